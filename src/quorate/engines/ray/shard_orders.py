"""Orders of shards: what an order is for, and which order is likely to follow. Pure.

Between a worker's answer and its next order lies a round trip, and the result travels before. So an
order names the shard that is likely to follow, with the same parameters, and the actor has its
worker begin this speculative shard at once. If the next order is for the shard, the shard is under
way by then, or done. If not, the shard is cancelled without an answer to the coordinator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from msgspec import structs

from quorate.coordination.plan import Plan, from_json
from quorate.engines.job import Evaluation, Job, Training, class_of
from quorate.engines.processes import worker_messages as messages


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
    def of(message: messages.OpenJob) -> OpenJob:
        """Return the job of a message that opens a job."""
        plan = {**message.plan, "is_ordered": False, "sampling": None}
        plan["rows"] = plan["dealt_rows"]  # the number of rows; a shard's rows are not needed
        kind = class_of(message.work, Job)
        return OpenJob(message.averaged, from_json(plan), range(*message.steps), kind)

    def order(self, compute: messages.ComputeShards) -> ShardOrder:
        """Return the order in a message."""
        step, (slot,) = compute.step, compute.slots
        adds = slot is not None and compute.is_needed and not compute.snapshot
        shards = self.plan.shards_of(step) if adds else 1
        return ShardOrder(compute.job, step, compute.shard, slot, shards)

    def next(self, compute: messages.ComputeShards) -> tuple[int, int] | None:
        """Return step and shard of the likely next order with the same parameters, if known."""
        if compute.snapshot or self.kind not in (Training, Evaluation):
            return None
        step, rank_of = compute.step, compute.rank_of
        later = [s for s in self.plan.home_shards(rank_of, step) if s > compute.shard]
        if not later and self.kind is Evaluation and step + 1 in self.steps:
            step += 1
            later = [*self.plan.home_shards(rank_of, step)]
        return (step, later[0]) if later else None


def likely_order(order: messages.ComputeShards) -> messages.ComputeShards | None:
    """Return the likely next order, under a ticket of its own; None if unknown.

    A speculative shard knows nothing of user code's changes.
    """
    if order.following is None:
        return None
    step, shard = order.following
    own = {"ticket": -2 - order.ticket, "model_changes": None, "shared": None, "following": None}
    return structs.replace(order, step=step, shard=shard, **own)


@dataclass
class GivenShard:
    """A shard that a worker computes, or has computed before an order of the coordinator."""

    given: messages.ComputeShards  # the order as the worker has it
    slot: int  # of the result
    order: messages.ComputeShards | None  # the coordinator's; None: the shard is speculative
    answer: messages.Answer | None = None  # the worker's, once there
    is_wrong: bool = False  # whether the coordinator has ordered a different shard

    def matches(self, order: messages.ComputeShards) -> bool:
        """Return whether an order without images asks for this shard, and the same model."""
        given = self.given
        return (
            order.model_changes is None
            and order.shared is None
            and (order.job, order.step, order.shard) == (given.job, given.step, given.shard)
            and order.rank_of == given.rank_of
        )
