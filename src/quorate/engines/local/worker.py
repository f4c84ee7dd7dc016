"""A worker of this process: what it computes with."""

from __future__ import annotations

from quorate.coordination.protocol import Cancelled, Compute, Done, Failed
from quorate.data.feed import Feed
from quorate.engines.amendments import Amendments, Follower
from quorate.engines.job import Job, Original
from quorate.engines.local.step_sums import StepSums
from quorate.engines.shard_runner import ShardFailure, ShardRunner
from quorate.engines.worker_status import Timesheet
from quorate.machine.signal_handlers import ends_program
from quorate.replica.replica import Replica
from quorate.replica.snapshots import Snapshot
from quorate.replica.streams import Stream


class LocalWorker:
    """A replica, a timesheet, and the changes of the coordinator's model to follow.

    Args:
        number: of the worker.
        original: the coordinator's model, if what user code changes in it is to be followed.
    """

    def __init__(self, number: int, replica: Replica, original: Original | None) -> None:
        self.number = number
        self.replica = replica
        self.sheet = Timesheet()  # written by the worker's thread, once the thread runs
        self.sheet.tell("starting")
        self._runner = ShardRunner(number, replica, self.sheet.tell, passes=ends_program)
        self._original = original
        self._follower: Follower | None = None
        if original is not None:
            self._follower = Follower(
                replica.model, replica.trained, original.frozen, replica.changed
            )

    def amendments(self) -> Amendments | None:
        """Return what was changed in the coordinator's model, as it is now."""
        return None if self._original is None else self._original.amendments()

    def compute(
        self,
        orders: Orders,
        stream: Stream,
        given: Compute,
        *,
        snapshot: Snapshot | None = None,
        amendments: Amendments | None = None,
    ) -> Done | Cancelled | Failed:
        """Compute shards of a job, and return how that went. Called in the worker's own thread.

        Blocks for as long as the shards take.

        Args:
            snapshot: the parameters to compute from, if not the parameters as they are.
            amendments: changes of the coordinator's model when the shards were dealt.
        """
        step, first, job = given.step, given.shard, orders.job
        self._note_spans(job, step, first)

        def rows() -> Feed:
            if self._follower is not None and amendments is not None:
                self._follower.take(amendments)
                self.replica.called.shared.take(amendments.shared)
            return orders.feed

        results = self._runner.run(
            *(job, rows, stream, step, first, [None] * given.count),
            is_cancelled=lambda: orders.cancelled == (step, first),
            snapshot=snapshot,
        )
        if results is None:
            return Cancelled(self.number, step, first)
        if isinstance(results, ShardFailure):
            orders.errors[step, results.shard] = results.error
            return Failed(self.number, step, results.shard)
        for shard, result in enumerate(results, start=first):
            orders.sums.pending[step, shard] = result.computed_by(self.number, shard)
        return Done(self.number, step, first)

    def _note_spans(self, job: Job, step: int, shard: int) -> None:
        """Hand over what is noted of the shard before, and note what follows if it is wanted."""
        if job.trace is None:
            return
        self.hand_over_spans(job)
        is_wanted = step in job.trace.steps_of(job)
        self.sheet.record(job.name if is_wanted else None, step, shard)

    def hand_over_spans(self, job: Job) -> None:
        """Move the noted spans to the trace of a job, and note no more. Thread-safe."""
        if job.trace is not None and (spans := self.sheet.recorded(cuts=False)) is not None:
            job.trace.take_batch(self.number, spans)
            self.sheet.record(None)


class Orders:
    """What one worker has to do and has done for one job.

    Args:
        feed: rows of the job.
    """

    def __init__(self, job: Job, feed: Feed, replica: Replica) -> None:
        self.job = job
        self.feed = feed
        self.sums = StepSums(job.plan, replica)
        self.cancelled: tuple[int, int] | None = None  # step and first shard
        self.errors: dict[tuple[int, int], BaseException] = {}  # by step and shard
