"""Jobs: what workers compute. Training shards yield gradients, evaluation shards metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod

from quorate.feed import Batch, Feed
from quorate.flat import Flat
from quorate.keys import key
from quorate.plan import Plan
from quorate.replica import Replica
from quorate.shard_sum import ShardSum
from quorate.streams import Stream


class Job(ABC):
    """One pass over data, cut into steps and shards.

    Args:
        plan: which rows a shard has.
        feed: loads them.
        parameters: the coordinator's, plain or averaged, that shards are computed from.
    """

    def __init__(self, plan: Plan, feed: Feed, parameters: Flat) -> None:
        self.plan = plan
        self._feed = feed
        self._parameters = parameters

    def compute(self, replica: Replica, stream: Stream, step: int, shard: int) -> ShardSum:
        """Compute one shard on a replica. Blocks; called by the worker's own thread."""
        batch = self._feed.take((step, shard))
        # Within a step parameters do not change; a job that ended leaves others behind.
        replica.pull(self._parameters, version=(self, step))
        return self._work(replica, batch, stream, step, shard)

    @abstractmethod
    def _work(
        self, replica: Replica, batch: Batch, stream: Stream, step: int, shard: int
    ) -> ShardSum: ...


class Training(Job):
    """Gradients of the loss, shard by shard."""

    def _work(
        self, replica: Replica, batch: Batch, stream: Stream, step: int, shard: int
    ) -> ShardSum:
        seed = key("shard", self.plan.seed, step, shard)
        return replica.gradient(batch.data, len(batch.rows), stream, seed)


class Evaluation(Job):
    """Metrics of the loss function in evaluation mode."""

    def _work(
        self, replica: Replica, batch: Batch, stream: Stream, step: int, shard: int
    ) -> ShardSum:
        seed = key("evaluation", self.plan.seed, step, shard)
        return replica.evaluation(batch.data, len(batch.rows), stream, seed)
