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

from quorate.coordination.protocol import (
    Cancel,
    Cancelled,
    Compute,
    Discard,
    Done,
    Event,
    Failed,
    Joined,
    Keep,
    Replace,
    Tick,
)
from quorate.engines.amendments import Amendments
from quorate.engines.job import Job, NotWanted, Original
from quorate.engines.local.lock_waits import ShortWaits
from quorate.engines.local.worker import LocalWorker, Orders
from quorate.engines.worker_status import WorkerStatus
from quorate.machine.devices import Group
from quorate.machine.freed_memory import keep_freed_memory, return_freed_memory
from quorate.machine.limits import ABANDONED_S, THREAD_EXIT_S
from quorate.replica.buffers import Buffers
from quorate.replica.compute_thread import as_compute_thread, become_compute_thread, interrupt
from quorate.replica.replica import Replica
from quorate.replica.shard_sum import Part, ShardSum
from quorate.replica.snapshots import Snapshot, Snapshots, new_vectors
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
        self._towers: list[ThreadTower | CallerTower] = [
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


class TowersChannel:
    """One job's conversation with all towers."""

    now = staticmethod(time.monotonic)  # half a dozen times an update

    def __init__(
        self, job: Job, towers: Sequence[ThreadTower | CallerTower], buffers: Buffers
    ) -> None:
        self._job = job
        self._towers = towers
        replicas = [tower.worker.replica for tower in towers]
        self._feed = job.feed(moves_to=replicas[0].device)
        self._orders = [Orders(job, self._feed, replica) for replica in replicas]
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._failure: Exception | None = None  # of adding, which no other worker could do better
        self._collected: list[tuple[Replica, ShardSum]] = []  # by the last ``collect``
        self._caller = next((t for t in towers if isinstance(t, CallerTower)), None)
        self._snapshots: Snapshots | None = None
        if job.on_snapshots and self._caller is None:
            slots = {n: new_vectors(job.parameters, buffers) for n in range(len(towers) + 1)}
            self._snapshots = Snapshots(job.parameters, buffers, slots)
        for tower in towers:
            self._events.put(Joined(tower.worker.number))

    def send(self, effect: Compute | Keep | Discard | Cancel | Replace) -> None:
        """Give a tower work. Does not block."""
        assert not isinstance(effect, Replace)
        tower, orders = self._towers[effect.worker], self._orders[effect.worker]
        match effect:
            case Compute():
                snapshot = amendments = None
                if self._caller is None:
                    amendments = tower.worker.amendments()
                if self._snapshots is not None:
                    snapshot = self._snapshots.lend(effect.worker)
                compute = partial(self._compute, tower, orders, effect, snapshot, amendments)
                tower.compute(compute)
            case Keep():
                orders.sums.keep(effect)
                tower.do(partial(self._push, tower, orders))
            case Discard():
                tower.do(partial(orders.sums.discard, effect))
            case Cancel():
                orders.cancelled = (effect.step, effect.shard)

    def receive(self, timeout_s: float | None) -> Event | None:
        """Return the next event, or None after ``timeout_s`` seconds. Blocks."""
        if self._caller is not None and self._events.empty():
            self._caller.run()
        try:
            event = self._events.get(timeout=timeout_s)
        except Empty:
            return None
        if self._failure is not None:
            raise self._failure
        if self._snapshots is not None and isinstance(event, Done | Failed | Cancelled):
            self._snapshots.give_back(event.worker)
        return event

    def post(self, event: Event) -> None:
        """Add an event of the coordinator's own. Any thread, also a signal handler, may call it."""
        self._events.put(event)

    def collect(self, step: int, holders: Sequence[int]) -> list[Part]:
        """Return the sums of a step. Blocks: what towers have not added yet is added here."""
        for worker in holders:
            self._add(self._orders[worker])
        if self._failure is not None:
            raise self._failure
        parts = [(w, *part) for w in holders for part in self._orders[w].sums.take(step)]
        self._collected = [(self._towers[w].worker.replica, value) for w, _, value in parts]
        return [(node, value) for _, node, value in parts]

    def publish(self) -> None:
        """Give the vectors of what was collected back to the replicas."""
        for replica, part in self._collected:
            replica.recycle(part)
        self._collected = []
        if self._snapshots is not None:
            self._snapshots.renew()

    def error(self, worker: int, step: int, shard: int) -> BaseException:
        """Return what was raised in a shard."""
        return self._orders[worker].errors[step, shard]

    def close(self) -> None:
        """End the job. Towers stay."""
        self._feed.close()
        for tower in self._towers:
            tower.worker.hand_over_spans(self._job)

    def _compute(
        self,
        tower: ThreadTower | CallerTower,
        orders: Orders,
        given: Compute,
        snapshot: Snapshot | None,
        amendments: Amendments | None,
        stream: Stream,
    ) -> None:
        worker = tower.worker
        if tower is self._caller:  # since the shard was dealt nothing has happened
            amendments = worker.amendments()
        self._events.put(
            worker.compute(orders, stream, given, snapshot=snapshot, amendments=amendments)
        )

    def _push(self, tower: ThreadTower | CallerTower, orders: Orders) -> None:
        if tower is not self._caller:
            tower.worker.sheet.tell("pushing")
        self._add(orders)

    def _add(self, orders: Orders) -> None:
        try:
            orders.sums.add_kept()
        except Exception as error:  # the edge of the thread: raised by receive() or collect()
            self._failure = error
            self._events.put(Tick())


class CallerTower:
    """A single tower, whose shards the calling thread computes."""

    def __init__(self, worker: LocalWorker, threads: int) -> None:
        self.worker = worker
        self.native_id: int | None = None  # the kernel's number of the thread
        self._compute_thread = as_compute_thread(threads, worker.replica.device)
        self._stream = Stream()
        self._given: Callable[[Stream], None] | None = None

    def begin(self) -> None:
        """Note that the calling thread computes from now on."""
        self.native_id = threading.get_native_id()
        self.worker.sheet.tell("waiting")

    def do(self, work: Callable[[], None]) -> None:
        """Carry out work that needs no stream, at once."""
        work()

    def compute(self, work: Callable[[Stream], None]) -> None:
        """Note work for ``run``."""
        self._given = work

    def run(self) -> None:
        """Compute what was given, if anything was. Blocks."""
        given, self._given = self._given, None
        if given is not None:
            with self._compute_thread, self._stream as stream:
                given(stream)
            self.worker.sheet.tell("waiting")

    def end(self) -> None:
        """Free what the replica keeps for the next shard."""
        self.native_id = None
        self.worker.replica.close()


class ThreadTower(threading.Thread):
    """A tower's thread: carries out what is put into its mailbox, in order."""

    def __init__(self, worker: LocalWorker, threads: int) -> None:
        super().__init__(name=f"quorate-tower-{worker.number}", daemon=True)
        self.worker = worker
        self._mailbox: SimpleQueue[Callable[[Stream], None] | None] = SimpleQueue()
        self._threads = threads

    def begin(self) -> None:
        """Start the thread, if it has not been started."""
        if self.ident is None:
            self.start()

    def do(self, work: Callable[[], None]) -> None:
        """Put work that needs no stream into the mailbox."""
        self._mailbox.put(lambda _: work())

    def compute(self, work: Callable[[Stream], None]) -> None:
        """Put work into the mailbox."""
        self._mailbox.put(work)

    def end(self) -> None:
        """Have the thread end when its mailbox is empty."""
        self._mailbox.put(None)

    def run(self) -> None:
        """Carry out what comes, until ``end``."""
        become_compute_thread(self._threads, self.worker.replica.device)
        with suppress(NotWanted), Stream() as stream:  # or it is interrupted
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
