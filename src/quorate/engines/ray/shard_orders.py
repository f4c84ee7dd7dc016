"""A guess: a shard that a worker begins before it is asked for. Pure.

Between a worker's answer and its next order lies a round trip, and before it the result travels. So
an order says which shard is likely to be next, of the same parameters, and the agent has its worker
begin that one at once. If it is what is ordered next, it is under way by then, or done; if
something else is, it is left off, and nobody hears of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from quorate.coordination.plan import Plan
from quorate.engines.messages import Message

_TOLD = {"amendments", "shared"}  # what user code changed, which no guess knows


@dataclass
class SpeculativeShard:
    """One shard that was begun, and what is known of it.

    Args:
        order: as the worker has it, under a ticket that no order of the coordinator's has.
        slot: that its result is written to, if it has one.
    """

    order: Message
    slot: int
    ordered: Message | None = None  # the order that it turned out to be
    answer: Message | None = None  # the worker's
    is_wrong: bool = False  # something else was ordered

    @property
    def ticket(self) -> int:
        """The ticket that the worker knows."""
        ticket: int = self.order["ticket"]
        return ticket

    def is_for(self, order: Message) -> bool:
        """Return whether an order asks for this, of what the node has by now."""
        same = ("kind", "job", "step", "shard", "rank_of")
        return (
            not order.get("images")
            and not order.keys() & _TOLD
            and all(order.get(name) == self.order[name] for name in same)
        )

    def reply(self) -> Message | None:
        """Return the answer to the order, once both are there."""
        if self.ordered is None or self.answer is None:
            return None
        return {**self.answer, "ticket": self.ordered["ticket"]}


def guessed(order: Message) -> Message | None:
    """Return the order of the shard that is likely to follow; None where nobody knows one."""
    if order.get("next") is None:
        return None
    step, shard = order["next"]
    own = {"ticket": -2 - order["ticket"], "images": [], "next": None}
    guess = {**order, **own, "step": step, "shard": shard}
    return {name: value for name, value in guess.items() if name not in _TOLD}


def likely_next(
    plan: Plan, steps: range, rank_of: tuple[int, int], at: tuple[int, int], *, goes_on: bool
) -> list[int] | None:
    """Return step and shard of what a worker computes next, of the same parameters, if it is known.

    Args:
        steps: of the job.
        rank_of: rank of the worker, and how many there are.
        at: step and shard that it computes.
        goes_on: whether the next step is computed from the same parameters.
    """
    step, shard = at
    later = [s for s in plan.home_shards(rank_of, step) if s > shard]
    if not later and goes_on and step + 1 in steps:
        step += 1
        later = [*plan.home_shards(rank_of, step)]
    return [step, later[0]] if later else None
