"""Own shards: the shards of a step computed by a rank, a subtree of the tree of shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from quorate.coordination.tree import Node, TreeSum, leaves
from quorate.data.feed import Feed
from quorate.data.source import Source
from quorate.engines.collective.exchange import GradientExchange
from quorate.engines.job import Training
from quorate.engines.shard_runner import ShardFailure, ShardRunner
from quorate.engines.tracing import Batch
from quorate.engines.worker_status import Timesheet
from quorate.replica.flat import Flat
from quorate.replica.replica import Replica
from quorate.replica.shard_sum import Part, ShardSum
from quorate.replica.streams import Stream
from quorate.replica.whole_batch.represented import Represented, Tensors
from quorate.training.whole_batch.jobs import BackThrough, Representing


class OwnedTraining(Training):
    """A job for the gradients of the shards owned by each rank.

    Args:
        dealt: returns for V the node owned by each rank.
    """

    def __init__(
        self,
        dealt: Callable[[int], Sequence[Node | None]],
        source: Source,
        parameters: Flat,
        steps: range,
        **options: Any,
    ) -> None:
        super().__init__(source, parameters, steps, **options)
        self._dealt = dealt

    def home_shards(self, rank_of: tuple[int, int], step: int) -> range:
        """Return the shards of a step owned by a rank: the shards of a subtree."""
        (rank, _), shards = rank_of, self.plan.shards_of(step)
        node = self._dealt(shards)[rank]
        return range(0) if node is None else leaves(node, shards)


class OwnedRepresenting(OwnedTraining, Representing):
    """A job for the representations of the shards owned by each rank."""


class OwnShards:
    """The computation of this rank's shards, in the calling thread. Close the object at the end.

    Args:
        rank_of: this rank, and the number of ranks.
        replica: the replica of this rank.
        exchange: receives the gradients.
        source: the source of the rows.
        parameters: the parameters to compute from.
        steps: all steps that the loop may make.
        represents: whether the loss is over the whole batch: see ``represented``.
        loader_workers: number of processes to load rows.
        threads: intra-op threads of each loader.
    """

    def __init__(
        self,
        rank_of: tuple[int, int],
        replica: Replica,
        exchange: GradientExchange,
        source: Source,
        parameters: Flat,
        steps: range,
        *,
        represents: bool,
        loader_workers: int,
        threads: int,
    ) -> None:
        self._rank_of, self._replica, self._exchange = rank_of, replica, exchange
        self._source, self._threads = source, threads
        self.sheet = Timesheet()  # activities of this rank
        self._runner = ShardRunner(rank_of[0], replica, self.sheet)
        self._parameters = parameters
        self._make_job = partial(
            OwnedRepresenting if represents else OwnedTraining,
            exchange.dealt,
            source,
            parameters,
            steps,
            loader_workers=loader_workers,
            threads=threads,
        )
        self._job: Training = self._make_job()
        self._feed: Feed | None = None
        self._before: list[ShardSum] = []  # sums of all shards but the last

    def close(self) -> None:
        """Close the feed."""
        if self._feed is not None:
            self._feed.close()

    def of(self, step: int) -> range:
        """Return this rank's shards of a step."""
        return self._job.home_shards(self._rank_of, step)

    def take_parameters(self) -> None:
        """Compute the next shards from the present parameters, also within a step."""
        self._job = self._make_job()  # a replica reads the parameters anew for each job

    def recycle(self) -> None:
        """Reuse the memory of sums that nobody reads any more."""
        for each in self._before:
            self._replica.recycle(each)

    def spans(self) -> Batch | None:
        """Return the activities of this rank since the last call; None without a trace."""
        trace, found = self._job.trace, self.sheet.recorded(cuts=False)
        if trace is None or found is None:
            return None
        # Workers of evaluations, threads of rank 0, have the same numbers as ranks.
        found["spans"] = [span._replace(track="rank") for span in found["spans"]]
        if self._rank_of[0] > 0:  # on rank 0 the trace of the run has these spans
            found["spans"] += trace.take_own("main thread")
        return found

    def take_spans(self, rank: int, spans: Batch) -> None:
        """Add the activities of a rank to the trace of this process, rank 0."""
        if self._job.trace is not None:
            self._job.trace.take_batch(rank, spans)

    def note_other_spans(self) -> None:
        """Note further activities as "beside training", until the next shard of training."""
        if self._job.trace is not None and self._job.trace.is_on:
            self.sheet.record("beside training")

    def represented(self, step: int, shards: range, stream: Stream) -> list[Represented]:
        """Return the representations of shards, and keep the rows for ``summed``. Blocks."""
        found: list[Represented] = []
        for shard in shards:
            found += self._computed(self._job, step, shard, stream).represented
        return found

    def summed(
        self,
        step: int,
        shards: range,
        gradients: Mapping[int, Tensors] | None,
        stream: Stream,
    ) -> Part:
        """Return the sum of some shards, without the gradient: the gradient buckets receive it.

        Args:
            gradients: by shard, with respect to its representations; None without representations.
        """
        job, buckets = self._job, self._exchange.gradient_buckets
        if gradients is not None:
            steps, threads = range(step, step + 1), self._threads
            job = BackThrough(
                self._source, self._parameters, steps, gradients=gradients, threads=threads
            )
        replica, self._before = self._replica, []
        tree: TreeSum[ShardSum] = TreeSum(self._source.plan.shards_of(step), replica.add)
        for shard in shards:
            is_last = shard == shards[-1]
            if is_last:  # the exchange adds the earlier sums, bucket by bucket
                before = [part for _, part in sorted(tree.parts.items())]
                self._before = [replace(part) for part in before]
                for part in before:
                    part.gradient = None
                buckets.begin([part.gradient for part in self._before if part.gradient is not None])
            result = self._computed(job, step, shard, stream, buckets if is_last else None)
            if is_last:
                result.gradient = None
            tree.put((0, shard), result)
        ((node, total),) = tree.parts.items()
        return node, total

    def _computed(
        self, job: Training, step: int, shard: int, stream: Stream, into: Flat | None = None
    ) -> ShardSum:
        feed = self._feed = self._feed or self._job.feed(
            self._rank_of, (step, shard), self._replica.device
        )
        if job.trace is not None and self._rank_of[0] > 0:
            job.trace.step = step
        outcome = self._runner.run(
            *(job, lambda: feed, stream, step, shard, [into]),
            is_cancelled=lambda: False,
            is_only=True,
        )
        assert outcome is not None
        if isinstance(outcome, ShardFailure):
            raise outcome.error
        return outcome[0]
