"""Inline: one worker, which is the thread that drives. There is no queue, and no other thread.

A tower that is alone would only hand the interpreter's lock to and fro: whoever waits for a shard
may as well compute it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from quorate.coordination.protocol import (
    Cancel,
    Cancelled,
    Compute,
    Discard,
    Event,
    Joined,
    Keep,
    Replace,
)
from quorate.engines.desk import Desk, Results
from quorate.engines.job import Job, Original
from quorate.engines.worker_status import WorkerStatus
from quorate.machine.devices import Group
from quorate.machine.freed_memory import return_freed_memory
from quorate.replica.compute_thread import as_compute_thread
from quorate.replica.replica import Replica
from quorate.replica.shard_sum import Part, ShardSum
from quorate.replica.streams import Stream


class Inline:
    """One replica, on one device entry.

    Args:
        group: the devices.
        make_replica: called here, once.
        threads: intra-op threads. The bits of a matrix product depend on it.
        original: the coordinator's model, if what user code changes in it is to be followed.
    """

    can_replace = False  # who would?
    takes_runs = True

    def __init__(
        self,
        group: Group,
        make_replica: Callable[[Group], Replica],
        *,
        threads: int,
        original: Original | None = None,
    ) -> None:
        self.threads = threads
        self._desk = Desk(0, make_replica(group), original)
        self._thread: int | None = None  # the kernel's number of it

    @property
    def replicas(self) -> list[Replica]:
        """The replica, as those of all towers."""
        return [self._desk.replica]

    def can_compute(self, dataset: object) -> bool:  # noqa: ARG002
        """Return True: this thread has what this process has."""
        return True

    def open(self, job: Job) -> InlineChannel:
        """Begin a job, in the thread that will drive it."""
        self._thread = threading.get_native_id()
        self._desk.sheet.tell("waiting")
        return InlineChannel(job, self._desk, self.threads)

    def status(self) -> list[WorkerStatus]:
        """Return what the worker is at. Any thread may."""
        group = str(self._desk.replica.group)
        return [WorkerStatus(0, group, None, self._thread, *self._desk.sheet.read())]

    def close(self) -> None:
        """End it: memory that was kept for the next shard is free."""
        self._thread = None
        self._desk.replica.close()
        return_freed_memory()


class InlineChannel:
    """One job's conversation: what is asked for is computed when the answer is waited for."""

    now = staticmethod(time.monotonic)  # half a dozen times an update

    def __init__(self, job: Job, desk: Desk, threads: int) -> None:
        self._desk = desk
        self._feed = job.feed(moves_to=desk.replica.device)
        self._results = Results(job, desk.replica)
        self._stream = Stream()
        self._compute_thread = as_compute_thread(threads, desk.replica.device)
        self._given: Compute | None = None
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._collected: list[ShardSum] = []  # by the last ``collect``
        self._events.put(Joined(0))

    def send(self, effect: Compute | Keep | Discard | Cancel | Replace) -> None:
        """Note what to compute; what was computed is added up or forgotten."""
        assert not isinstance(effect, Replace)
        match effect:
            case Compute():
                self._given = effect
            case Keep():
                self._results.add(effect)
            case Discard():
                self._results.discard(effect)
            case Cancel():
                if self._given is not None:  # not begun
                    self._given = None
                    self._events.put(Cancelled(0, effect.step, effect.shard))

    def receive(self, timeout_s: float | None) -> Event | None:
        """Return the next event; if there is a shard to compute, that it is computed. Blocks."""
        if self._given is not None and self._events.empty():
            return self._compute()
        try:
            return self._events.get(timeout=timeout_s)
        except Empty:
            return None

    def post(self, event: Event) -> None:
        """Add an event of the coordinator's own. Any thread, also a signal handler, may."""
        self._events.put(event)

    def collect(self, step: int, holders: Sequence[int]) -> list[Part]:
        """Return the sums of a step."""
        parts = self._results.take(step) if holders else []
        self._collected = [value for _, value in parts]
        return parts

    def publish(self) -> None:
        """Give the vectors of what was collected back to the replica."""
        for value in self._collected:
            self._desk.replica.recycle(value)
        self._collected = []

    def error(self, worker: int, step: int, shard: int) -> BaseException:  # noqa: ARG002
        """Return what was raised in a shard."""
        return self._results.errors[step, shard]

    def close(self) -> None:
        """End the job. The worker stays."""
        self._feed.close()
        self._desk.hand_over_spans(self._results.job)

    def _compute(self) -> Event:
        given, self._given = self._given, None
        assert given is not None
        desk = self._desk
        # As it is now: nothing happens between that it is dealt and that it is computed.
        amendments = desk.amendments()
        with self._compute_thread, self._stream as stream:
            answer = desk.compute(self._results, self._feed, stream, given, amendments=amendments)
        desk.sheet.tell("waiting")
        return answer
