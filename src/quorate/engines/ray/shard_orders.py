"""Orders of shards: what an order is for, and which order is likely to follow. Pure.

Between a worker's answer and its next order lies a round trip, and the result travels before. So an
order names the shard that is likely to follow, with the same parameters, and the actor has its
worker begin this speculative shard at once. If the next order is for the shard, the shard is under
way by then, or done. If not, the shard is cancelled without an answer to the coordinator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from quorate.coordination.plan import Plan, from_json
from quorate.engines.job import Evaluation, Job, Training, class_of
from quorate.engines.messages import Message

_USER_CHANGES = {"amendments", "shared"}  # of which a speculative shard knows nothing


class ShardOrder(NamedTuple):
    """A shard that a worker computes."""

    job: int
    step: int
    shard: int
    slot: int | None  # of the coordinator's arena; None: the shard yields no vectors
    shards: int  # V of its step, if the result may be added to siblings on its node, else 1


class OpenJob(NamedTuple):
    """An open job, as far as the coordinator's handle of a worker needs to know."""

    averaged: bool  # whether shards are computed from averaged parameters
    plan: Plan
    steps: range
    kind: type[Job]

    @staticmethod
    def of(message: Message) -> OpenJob:
        """Return the job of a message that opens a job."""
        plan = {**message["plan"], "is_ordered": False, "sampling": None}
        plan["rows"] = plan["dealt_rows"]  # the number of rows; a shard's rows are not needed
        steps = range(*message["steps"])
        return OpenJob(message["averaged"], from_json(plan), steps, class_of(message["work"], Job))

    def order(self, compute: Message) -> ShardOrder:
        """Return the order in a message."""
        step, shard, slot = compute["step"], compute["shard"], compute["slot"]
        adds = slot is not None and compute["is_needed"] and not compute["snapshot"]
        shards = self.plan.shards_of(step) if adds else 1
        return ShardOrder(compute["job"], step, shard, slot, shards)

    def next(self, compute: Message) -> list[int] | None:
        """Return step and shard of the likely next order with the same parameters, if known."""
        if compute["snapshot"] or self.kind not in (Training, Evaluation):
            return None
        step, rank_of = compute["step"], tuple(compute["rank_of"])
        later = [s for s in self.plan.home_shards(rank_of, step) if s > compute["shard"]]
        if not later and self.kind is Evaluation and step + 1 in self.steps:
            step += 1
            later = [*self.plan.home_shards(rank_of, step)]
        return [step, later[0]] if later else None


def likely_order(order: Message) -> Message | None:
    """Return the likely next order, under a ticket of its own; None if unknown."""
    if order.get("next") is None:
        return None
    step, shard = order["next"]
    own = {"ticket": -2 - order["ticket"], "images": [], "next": None}
    following = {**order, **own, "step": step, "shard": shard}
    return {name: value for name, value in following.items() if name not in _USER_CHANGES}


@dataclass
class GivenShard:
    """A shard that a worker computes, or has computed before an order of the coordinator."""

    given: Message  # the order as the worker has it
    slot: int  # of the result
    order: Message | None  # the coordinator's; None: the shard is speculative
    answer: Message | None = None  # the worker's, once there
    is_wrong: bool = False  # whether the coordinator has ordered a different shard

    def matches(self, order: Message) -> bool:
        """Return whether an order asks for this shard, from values that the node has by now."""
        same = ("kind", "job", "step", "shard", "rank_of")
        return (
            not order.get("images")
            and not order.keys() & _USER_CHANGES
            and all(order.get(name) == self.given[name] for name in same)
        )
