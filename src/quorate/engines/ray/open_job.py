"""A job that is open, as a hand knows it: what an order is for, and what is likely to follow it."""

from __future__ import annotations

from typing import NamedTuple

from quorate.coordination.plan import Plan, from_json
from quorate.engines.job import Evaluation, Job, Training, class_of
from quorate.engines.messages import Message
from quorate.engines.ray.node_results import ShardOrder
from quorate.engines.ray.speculative_shard import likely_next


class OpenJob(NamedTuple):
    """What of it decides who computes what."""

    averaged: bool  # whether it computes from averaged parameters
    plan: Plan
    steps: range
    kind: type[Job]

    @staticmethod
    def of(message: Message) -> OpenJob:
        """Return what the message says that asks a worker to join."""
        plan = {**message["plan"], "is_ordered": False, "sampling": None}
        plan["rows"] = plan["dealt_rows"]  # how many there are, and not which ones a shard has
        steps = range(*message["steps"])
        return OpenJob(message["averaged"], from_json(plan), steps, class_of(message["work"], Job))

    def order(self, compute: Message) -> ShardOrder:
        """Return what a message asks for."""
        step, shard, slot = compute["step"], compute["shard"], compute["slot"]
        adds = slot is not None and compute["is_needed"] and not compute["snapshot"]
        shards = self.plan.shards_of(step) if adds else 1
        return ShardOrder(compute["job"], step, shard, slot, shards)

    def next(self, compute: Message) -> list[int] | None:
        """Return step and shard of what is likely to be asked for next, of the same parameters."""
        if compute["snapshot"] or self.kind not in (Training, Evaluation):
            return None
        goes_on = self.kind is Evaluation
        at, rank_of = (compute["step"], compute["shard"]), tuple(compute["rank_of"])
        return likely_next(self.plan, self.steps, rank_of, at, goes_on=goes_on)
