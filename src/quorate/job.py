"""Jobs: what workers compute. Training shards yield gradients, evaluation shards metrics."""

from __future__ import annotations

from typing import Protocol

from quorate.feed import Feed
from quorate.flat import Flat
from quorate.keys import key
from quorate.plan import Plan
from quorate.replica import Replica
from quorate.shard_sum import ShardSum
from quorate.streams import Stream


class Job(Protocol):
    """One pass over data, cut into steps and shards."""

    plan: Plan

    def compute(self, replica: Replica, stream: Stream, step: int, shard: int) -> ShardSum:
        """Compute one shard on a replica. Blocks; called by the worker's own thread."""


class Training:
    """Gradients of the loss, shard by shard."""

    def __init__(self, plan: Plan, feed: Feed, parameters: Flat) -> None:
        self.plan = plan
        self._feed = feed
        self._parameters = parameters

    def compute(self, replica: Replica, stream: Stream, step: int, shard: int) -> ShardSum:
        batch = self._feed.take((step, shard))
        replica.pull(self._parameters, version=step)
        seed = key("shard", self.plan.seed, step, shard)
        return replica.gradient(batch.data, len(batch.rows), stream, seed)


class Evaluation:
    """Metrics of the loss function in evaluation mode."""

    def __init__(self, plan: Plan, feed: Feed, parameters: Flat) -> None:
        self.plan = plan
        self._feed = feed
        self._parameters = parameters

    def compute(self, replica: Replica, stream: Stream, step: int, shard: int) -> ShardSum:
        batch = self._feed.take((step, shard))
        replica.pull(self._parameters, version=self)
        seed = key("evaluation", self.plan.seed, step, shard)
        return replica.evaluation(batch.data, len(batch.rows), stream, seed)
