"""Towers: workers of this process, one replica each, in threads of their own.

A tower's thread has its own random stream and its own number of intra-op threads, and owns its
replica. The replicas stay between steps and between jobs. A single tower has no thread: the thread
that drives computes while it waits for the answer, else both would hand the interpreter's lock to
and fro.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from quorate.coordination.protocol import Compute, Event, Joined
from quorate.data.feed import Feed
from quorate.engines.job import Job, NotWanted, Original
from quorate.engines.job_channel import JobChannel, Request
from quorate.engines.local.lock_waits import ShortWaits
from quorate.engines.model_changes import ModelChanges, ModelChangesReceiver
from quorate.engines.shard_runner import Outcome, ShardRunner
from quorate.engines.step_sums import StepSums
from quorate.engines.tracing import Batch
from quorate.engines.worker_status import Timesheet, WorkerStatus
from quorate.machine.devices import Group
from quorate.machine.freed_memory import keep_freed_memory, return_freed_memory
from quorate.machine.limits import ABANDONED_S, THREAD_EXIT_S
from quorate.machine.signal_handlers import ends_program
from quorate.replica.buffers import Buffers
from quorate.replica.compute_thread import as_compute_thread, become_compute_thread, interrupt
from quorate.replica.replica import Replica
from quorate.replica.snapshots import Snapshots, new_vectors
from quorate.replica.streams import Stream

_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_LIBRARY = str(sysconfig.get_path("stdlib")) + os.sep


class Towers:
    """A worker per device entry.

    Args:
        groups: the devices of each tower.
        make_replica: called here, once per tower.
        buffers: of the coordinator's model.
        threads: intra-op threads of each tower. The bits of a matrix product depend on it.
        say: shows a line to the user; the log does by default.
        original: the coordinator's model, if what user code changes in it is to be followed.
    """

    can_replace = False  # a thread cannot be ended
    takes_runs = True

    def __init__(
        self,
        groups: Sequence[Group],
        make_replica: Callable[[Group], Replica],
        buffers: Buffers,
        *,
        threads: int,
        say: Callable[[str], None] | None = None,
        original: Original | None = None,
    ) -> None:
        if any(group[0].type == "cpu" for group in groups):
            keep_freed_memory()
        self._say = say or logging.getLogger("quorate").warning
        kind = ThreadTower if len(groups) > 1 else CallerTower
        self._towers: list[Tower] = [
            kind(LocalWorker(number, make_replica(group), original), threads)
            for number, group in enumerate(groups)
        ]
        self.threads = threads
        self._buffers = buffers
        self._started = False
        self._waits = ShortWaits()

    @property
    def replicas(self) -> list[Replica]:
        """The replica of each tower."""
        return [tower.worker.replica for tower in self._towers]

    def can_compute(self, dataset: object) -> bool:  # noqa: ARG002
        """Return True: towers have what this process has."""
        return True

    def open(self, job: Job) -> TowersChannel:
        """Begin a job, in the thread that will drive it; the first job starts the threads."""
        channel = TowersChannel(job, self._towers, self._buffers)
        # Only now: the feed may have forked, which is no good with threads.
        self._started = True
        if self._threads:
            self._waits.begin()
        for tower in self._towers:
            tower.begin()
        return channel

    def status(self) -> list[WorkerStatus]:
        """Return what each tower is at. Any thread may call it."""
        return [
            WorkerStatus(w.number, str(w.replica.group), None, t.native_id, *w.sheet.read())
            for t, w in ((tower, tower.worker) for tower in self._towers)
        ]

    def close(self) -> None:
        """End the threads; a busy one ends with its shard, for which nobody waits long."""
        self._waits.end()
        for tower in self._towers:
            tower.end()
        threads = self._threads if self._started else []
        # A thread cannot be ended. Nobody waits long for one that computes what is not wanted, and
        # not at all after a second Ctrl-C; it ends with its shard.
        at_once = isinstance(sys.exc_info()[1], (KeyboardInterrupt, SystemExit))
        deadline = time.monotonic() + (ABANDONED_S if at_once else THREAD_EXIT_S)
        for thread in threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        return_freed_memory()
        held = [thread for thread in threads if thread.is_alive()]
        for thread in held:
            interrupt(thread, NotWanted)  # the channel is closed: nobody waits for an answer
        deadline = time.monotonic() + (ABANDONED_S if at_once else THREAD_EXIT_S)
        for thread in held:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                # It may be in a long operator, and an interpreter that ends meanwhile aborts.
                atexit.register(thread.join, THREAD_EXIT_S)
                self._say(f"worker {thread.worker.number} did not stop, {thread.held_by()}")

    @property
    def _threads(self) -> list[ThreadTower]:
        return [tower for tower in self._towers if isinstance(tower, ThreadTower)]


class TowersChannel(JobChannel):
    """A job's channel to towers. Each tower adds its own results."""

    def __init__(self, job: Job, towers: Sequence[Tower], buffers: Buffers) -> None:
        replicas = [tower.worker.replica for tower in towers]
        snapshots = None
        self._caller = next((t for t in towers if isinstance(t, CallerTower)), None)
        if job.on_snapshots and self._caller is None:
            slots = {n: new_vectors(job.parameters, buffers) for n in range(len(towers) + 1)}
            snapshots = Snapshots(job.parameters, buffers, slots)
        super().__init__(job, [StepSums(job.plan, r.recycle) for r in replicas], snapshots)
        self._towers = towers
        self._feed = job.feed(moves_to=replicas[0].device)
        self._inbox: SimpleQueue[Event | tuple[int, Outcome, Batch | None]] = SimpleQueue()
        for tower in towers:
            self._inbox.put(Joined(tower.worker.number))

    def receive(self, timeout_s: float | None) -> Event | None:
        """Return the next event, or None after ``timeout_s`` seconds. Blocks."""
        if self._caller is not None and self._inbox.empty():
            self._caller.run()
        try:
            news = self._inbox.get(timeout=timeout_s)
        except Empty:
            return None
        return self._answered(*news) if isinstance(news, tuple) else news

    def post(self, event: Event) -> None:
        """Add an event of the coordinator. Safe from any thread and from signal handlers."""
        self._inbox.put(event)

    def close(self) -> None:
        """End the job. Towers stay."""
        self._feed.close()

    def _request(self, effect: Compute, request: Request) -> None:
        tower = self._towers[effect.worker]
        # A single tower computes in ``receive``, from the model as the model is then.
        edits = None if self._caller is not None else tower.worker.edits()
        tower.compute(partial(self._run_shards, tower.worker, request, edits))

    def _run_shards(
        self, worker: LocalWorker, request: Request, edits: ModelChanges | None, stream: Stream
    ) -> None:
        """Compute the shards of a request, in the tower's thread."""
        outcome = worker.compute(self.job, self._feed, stream, request, edits)
        self._inbox.put((worker.number, outcome, worker.sheet.recorded(cuts=True)))

    def _decided(self, worker: int) -> None:
        if self._sums[worker].has_kept:
            self._towers[worker].do(self._sums[worker].add_kept)


class LocalWorker:
    """A worker of this process: a replica, a timesheet, and the edits of the coordinator's model.

    Args:
        number: of the worker.
        original: the coordinator's model, if edits by user code reach the replica.
    """

    def __init__(self, number: int, replica: Replica, original: Original | None) -> None:
        self.number = number
        self.replica = replica
        self.sheet = Timesheet()  # written by the worker's thread, once the thread runs
        self.sheet.tell("starting")
        self._runner = ShardRunner(number, replica, self.sheet, passes=ends_program)
        self._original = original
        self._changes_receiver: ModelChangesReceiver | None = None
        if original is not None:
            self._changes_receiver = ModelChangesReceiver(replica, original.frozen)

    def edits(self) -> ModelChanges | None:
        """Return the edits of the coordinator's model until now."""
        return None if self._original is None else self._original.model_changes()

    def compute(
        self, job: Job, feed: Feed, stream: Stream, request: Request, edits: ModelChanges | None
    ) -> Outcome:
        """Compute the shards of a request. Blocks; called in the worker's thread.

        Args:
            feed: rows of the job.
            edits: of the coordinator's model, when the request was sent; None: until now.
        """

        def rows() -> Feed:
            known = edits or self.edits()
            if self._changes_receiver is not None and known is not None:
                self._changes_receiver.take(known)
                self.replica.called.shared.take(known.shared)
            return feed

        return self._runner.run(
            *(job, rows, stream, request.step, request.shard, [None] * request.count),
            is_cancelled=lambda: request.is_cancelled,
            snapshot=request.snapshot,
        )


class CallerTower:
    """A single tower, whose shards the calling thread computes."""

    def __init__(self, worker: LocalWorker, threads: int) -> None:
        self.worker = worker
        self.native_id: int | None = None  # the kernel's number of the thread
        self._compute_thread = as_compute_thread(threads, worker.replica.device)
        self._stream = Stream()
        self._work: Callable[[Stream], None] | None = None

    def begin(self) -> None:
        """Note that the calling thread computes from now on."""
        self.native_id = threading.get_native_id()
        self.worker.sheet.tell("waiting")

    def do(self, work: Callable[[], None]) -> None:
        """Carry out short work at once."""
        work()

    def compute(self, work: Callable[[Stream], None]) -> None:
        """Keep work for ``run``."""
        self._work = work

    def run(self) -> None:
        """Carry out the work that was given, if any. Blocks."""
        work, self._work = self._work, None
        if work is not None:
            with self._compute_thread, self._stream as stream:
                work(stream)
            self.worker.sheet.tell("waiting")

    def end(self) -> None:
        """Free the memory that the replica keeps for the next shard."""
        self.native_id = None
        self.worker.replica.close()


class ThreadTower(threading.Thread):
    """A tower's thread, which carries out the work of its mailbox in order."""

    def __init__(self, worker: LocalWorker, threads: int) -> None:
        super().__init__(name=f"quorate-tower-{worker.number}", daemon=True)
        self.worker = worker
        self._mailbox: SimpleQueue[Callable[[Stream], None] | None] = SimpleQueue()
        self._threads = threads

    def begin(self) -> None:
        """Start the thread, unless the thread has started."""
        if self.ident is None:
            self.start()

    def do(self, work: Callable[[], None]) -> None:
        """Put short work into the mailbox."""

        def push(_: Stream) -> None:
            self.worker.sheet.tell("pushing")
            work()

        self._mailbox.put(push)

    def compute(self, work: Callable[[Stream], None]) -> None:
        """Put work into the mailbox."""
        self._mailbox.put(work)

    def end(self) -> None:
        """End the thread when the mailbox is empty."""
        self._mailbox.put(None)

    def run(self) -> None:
        """Carry out the work of the mailbox until ``end``."""
        become_compute_thread(self._threads, self.worker.replica.device)
        with suppress(NotWanted), Stream() as stream:  # ``Towers.close`` may raise NotWanted here
            self.worker.sheet.tell("waiting")
            while (work := self._mailbox.get()) is not None:
                work(stream)
                self.worker.sheet.tell("waiting")

    def held_by(self) -> str:
        """Return in words what keeps it from ending."""
        frame = sys._current_frames().get(self.ident or 0)
        where = ""
        while frame is not None and not where:
            file = frame.f_code.co_filename
            is_python = file.startswith((_LIBRARY, "<")) and "site-packages" not in file
            if not is_python and not file.startswith(_PACKAGE):
                where = f": {file}, line {frame.f_lineno}, in {frame.f_code.co_name}"
            frame = frame.f_back
        return (
            f"because your code is still running{where}; the program can exit only after your code "
            "returns"
        )


Tower = CallerTower | ThreadTower
