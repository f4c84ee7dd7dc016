"""The desk of a worker in this process: what it computes with, and what it holds for a job."""

from __future__ import annotations

import threading
from collections import deque
from functools import partial

from quorate.coordination.protocol import Cancelled, Compute, Discard, Done, Failed, Keep
from quorate.coordination.spans import SpanLog
from quorate.coordination.tree import TreeSum
from quorate.data.feed import Feed
from quorate.engines.amendments import Amendments, Follower
from quorate.engines.job import Job, NotWanted, Original, Task
from quorate.engines.tracing import note_own_spans
from quorate.engines.worker_status import OwnTimesheet
from quorate.machine.signal_handlers import ends_program
from quorate.replica.replica import Replica
from quorate.replica.shard_sum import Part, ShardSum
from quorate.replica.snapshots import Snapshot
from quorate.replica.streams import Stream


class Desk:
    """A replica, a timesheet, and the changes of the coordinator's model to follow.

    Args:
        number: of the worker.
        original: the coordinator's model, if what user code changes in it is to be followed.
    """

    def __init__(self, number: int, replica: Replica, original: Original | None) -> None:
        self.number = number
        self.replica = replica
        self.sheet = OwnTimesheet()  # the worker's to write, once it runs
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
        results: Results,
        feed: Feed,
        stream: Stream,
        given: Compute,
        *,
        snapshot: Snapshot | None = None,
        amendments: Amendments | None = None,
    ) -> Done | Cancelled | Failed:
        """Compute what was given, and return how that went. The worker's own thread calls it.

        Blocks for as long as the shards take.

        Args:
            results: of the job: takes what was computed, or what was raised.
            feed: of the job.
            snapshot: what it is computed from, if not from the parameters as they are.
            amendments: as they were when it was dealt.
        """
        step, first = given.step, given.shard
        job, sheet = results.job, self.sheet
        self._note_spans(job, step, first)
        now, dealt = first, (step, first)  # the shard that it is at

        def at(shard: int, ticket: tuple[int, int], phase: str) -> None:
            nonlocal now
            now = shard
            if results.cancelled == dealt:
                raise NotWanted
            sheet.tell(phase, *ticket)

        shards = range(first, first + given.count)
        tasks = [
            Task(self.number, step, shard, at=partial(at, shard, job.ticket(step, shard)))
            for shard in shards
        ]
        try:
            if self._follower is not None and amendments is not None:
                self._follower.take(amendments)
                self.replica.called.shared.take(amendments.shared)
            done = job.compute_run(self.replica, stream, feed, tasks, snapshot=snapshot)
        except NotWanted:
            return Cancelled(self.number, step, first)
        except BaseException as error:  # the edge of the worker: the coordinator decides
            if ends_program(error):
                raise
            job.annotate(error, tasks[now - first], self.replica.device)
            results.errors[step, now] = error
            return Failed(self.number, step, now)
        for shard, result in zip(shards, done, strict=True):
            results.pending[step, shard] = result.computed_by(self.number, shard)
        return Done(self.number, step, first)

    def _note_spans(self, job: Job, step: int, shard: int) -> None:
        """Hand over what is noted of the shard before, and note what follows if it is wanted."""
        if job.trace is None:
            return
        log = self.sheet.log = self.sheet.log or SpanLog()
        self.hand_over_spans(job)
        is_wanted = step in job.trace.steps_of(job)
        note_own_spans(log, job.name if is_wanted else None, step, shard)

    def hand_over_spans(self, job: Job) -> None:
        """Give the trace of a job, if there is one, what is noted; note no more. Any thread may."""
        if job.trace is not None and self.sheet.log is not None:
            job.trace.put(self.number, self.sheet.log.take())
            self.sheet.log.job = None


class Results:
    """What one worker holds for one job: results not decided on, and the sums of those kept.

    The worker adds what was decided when it comes to it; whoever collects adds the rest.
    """

    def __init__(self, job: Job, replica: Replica) -> None:
        self.job = job
        self._replica = replica
        self._sums: dict[int, TreeSum[ShardSum]] = {}  # by step
        self._adding = threading.Lock()
        self.pending: dict[tuple[int, int], ShardSum] = {}
        self.decided: deque[tuple[int, int]] = deque()  # (step, shard) to be kept
        self.cancelled: tuple[int, int] | None = None  # (step, shard) to leave off
        self.errors: dict[tuple[int, int], BaseException] = {}  # that user code raised

    def add_decided(self) -> None:
        """Add up what is to be kept."""
        with self._adding:
            while self.decided:
                step, shard = self.decided.popleft()
                self._sum_of(step).put((0, shard), self.pending.pop((step, shard)))

    def add(self, effect: Keep) -> None:
        """Add up what is to be kept, at once. For whoever is alone with them."""
        step, first = effect.step, effect.shard
        total, pending = self._sum_of(step), self.pending
        for shard in range(first, first + effect.count):
            total.put((0, shard), pending.pop((step, shard)))

    def _sum_of(self, step: int) -> TreeSum[ShardSum]:
        total = self._sums.get(step)
        if total is None:
            shards = self.job.plan.shards_of(step)
            total = self._sums[step] = TreeSum(shards, self._replica.add)
        return total

    def keep(self, effect: Keep) -> None:
        """Note what is to be added up."""
        step, first = effect.step, effect.shard
        self.decided.extend([(step, shard) for shard in range(first, first + effect.count)])

    def discard(self, effect: Discard) -> None:
        """Forget results that do not count."""
        for shard in range(effect.shard, effect.shard + effect.count):
            self._replica.recycle(self.pending.pop((effect.step, shard)))

    def take(self, step: int) -> list[Part]:
        """Return the parts of a step, which are held no longer."""
        return list(self._sums.pop(step).parts.items())
