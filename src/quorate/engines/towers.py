"""Towers: workers as threads of this process, one replica each.

A tower's thread has its own random stream and its own number of intra-op threads, and owns its
replica. The replicas stay between steps and between jobs.
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
from quorate.engines.desk import Desk, Results
from quorate.engines.inline import Inline
from quorate.engines.job import Job, NotWanted, Original
from quorate.engines.lock_waits import ShortWaits
from quorate.engines.worker_status import WorkerStatus
from quorate.machine.devices import Group
from quorate.machine.freed_memory import keep_freed_memory, return_freed_memory
from quorate.machine.limits import ABANDONED_S, THREAD_EXIT_S
from quorate.replica.buffers import Buffers
from quorate.replica.compute_thread import become_compute_thread, interrupt
from quorate.replica.replica import Replica
from quorate.replica.shard_sum import Part, ShardSum
from quorate.replica.snapshots import Snapshot, Snapshots, new_vectors
from quorate.replica.streams import Stream

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARY = str(sysconfig.get_path("stdlib")) + os.sep


class Towers:
    """A thread per device entry.

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
        self._say = say or logging.getLogger("quorate").warning
        self.towers = [
            _Tower(Desk(number, make_replica(group), original), threads)
            for number, group in enumerate(groups)
        ]
        self.threads = threads
        self._buffers = buffers
        self._started = False
        self._waits = ShortWaits()

    @property
    def replicas(self) -> list[Replica]:
        """The replica of each tower."""
        return [tower.desk.replica for tower in self.towers]

    def can_compute(self, dataset: object) -> bool:  # noqa: ARG002
        """Return True: towers have what this process has."""
        return True

    def open(self, job: Job) -> TowersChannel:
        """Begin a job; the first one starts the threads."""
        channel = TowersChannel(job, self.towers, self._buffers)
        if not self._started:  # only now: the feed may have forked, which is no good with threads
            self._started = True
            self._waits.begin()
            for tower in self.towers:
                tower.start()
        return channel

    def status(self) -> list[WorkerStatus]:
        """Return what each tower is at. Any thread may."""
        return [
            WorkerStatus(d.number, str(d.replica.group), None, t.native_id, *d.sheet.read())
            for t, d in ((tower, tower.desk) for tower in self.towers)
        ]

    def close(self) -> None:
        """End the threads; one that is busy ends with its shard, and nobody waits for it long."""
        if not self._started:
            return
        self._waits.end()
        for tower in self.towers:
            tower.mailbox.put(None)
        # A thread cannot be ended. Nobody waits long for one that computes what is not wanted, and
        # not at all after a second Ctrl-C; it ends with its shard.
        at_once = isinstance(sys.exc_info()[1], (KeyboardInterrupt, SystemExit))
        deadline = time.monotonic() + (ABANDONED_S if at_once else THREAD_EXIT_S)
        for tower in self.towers:
            tower.join(timeout=max(0.0, deadline - time.monotonic()))
        return_freed_memory()
        held = [tower for tower in self.towers if tower.is_alive()]
        for tower in held:
            interrupt(tower, NotWanted)  # the channel is closed: nobody waits for an answer
        deadline = time.monotonic() + (ABANDONED_S if at_once else THREAD_EXIT_S)
        for tower in held:
            tower.join(timeout=max(0.0, deadline - time.monotonic()))
            if tower.is_alive():
                # It may be in a long operator, and an interpreter that ends meanwhile aborts.
                atexit.register(tower.join, THREAD_EXIT_S)
                self._say(f"worker {tower.number} did not stop, {tower.held_by()}")


def workers_here(
    groups: Sequence[Group],
    make_replica: Callable[[Group], Replica],
    buffers: Buffers,
    *,
    threads: int,
    original: Original | None = None,
    say: Callable[[str], None] | None = None,
) -> Towers | Inline:
    """Return workers of this process: towers, or one that is inline. Arguments as of ``Towers``."""
    if any(group[0].type == "cpu" for group in groups):
        keep_freed_memory()
    if len(groups) == 1:
        return Inline(groups[0], make_replica, threads=threads, original=original)
    return Towers(groups, make_replica, buffers, threads=threads, original=original, say=say)


class TowersChannel:
    """One job's conversation with all towers."""

    def __init__(self, job: Job, towers: Sequence[_Tower], buffers: Buffers) -> None:
        self._job = job
        self._feed = job.feed(moves_to=towers[0].desk.replica.device)
        self._towers = towers
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._failure: Exception | None = None  # of adding, which no other worker could do better
        self._results = [Results(job, tower.desk.replica) for tower in towers]
        self._collected: list[tuple[Replica, ShardSum]] = []  # by the last ``collect``
        self._snapshots: Snapshots | None = None
        if job.on_snapshots:
            slots = {n: new_vectors(job.parameters, buffers) for n in range(len(towers) + 1)}
            self._snapshots = Snapshots(job.parameters, buffers, slots)
        for tower in towers:
            self._events.put(Joined(tower.number))

    def send(self, effect: Compute | Keep | Discard | Cancel | Replace) -> None:
        """Put work into a tower's mailbox. Does not block."""
        assert not isinstance(effect, Replace)
        tower, results = self._towers[effect.worker], self._results[effect.worker]
        match effect:
            case Compute():
                snapshot = None if self._snapshots is None else self._snapshots.lend(tower.number)
                given = effect, snapshot, tower.desk.amendments()
                tower.mailbox.put(lambda stream: self._compute(tower, stream, *given))
            case Keep():
                results.keep(effect)
                tower.mailbox.put(lambda _: self._push(tower, results))
            case Discard():
                tower.mailbox.put(lambda _: results.discard(effect))
            case Cancel():
                results.cancelled = (effect.step, effect.shard)

    def receive(self, timeout_s: float | None) -> Event | None:
        """Return the next event, or None after ``timeout_s`` seconds. Blocks."""
        try:
            event = self._events.get(timeout=timeout_s)
        except Empty:
            return None
        if self._failure is not None:
            raise self._failure
        if isinstance(event, Done | Failed | Cancelled) and self._snapshots is not None:
            self._snapshots.give_back(event.worker)
        return event

    def now(self) -> float:
        """Return the time of a monotonic clock, in seconds."""
        return time.monotonic()

    def post(self, event: Event) -> None:
        """Add an event of the coordinator's own. Any thread, also a signal handler, may."""
        self._events.put(event)

    def collect(self, step: int, holders: Sequence[int]) -> list[Part]:
        """Return the sums of a step. What towers have not added yet is added here; blocks."""
        # A holder may be computing another shard: what is left to add is added here.
        for worker in holders:
            self._add(self._results[worker])
        if self._failure is not None:
            raise self._failure
        parts = [(w, *part) for w in holders for part in self._results[w].take(step)]
        self._collected = [(self._towers[w].desk.replica, value) for w, _, value in parts]
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
        return self._results[worker].errors[step, shard]

    def close(self) -> None:
        """End the job. Towers stay."""
        self._feed.close()
        for tower in self._towers:
            tower.desk.hand_over_spans(self._job)

    def _compute(
        self,
        tower: _Tower,
        stream: Stream,
        given: Compute,
        snapshot: Snapshot | None,
        amendments: Amendments | None,
    ) -> None:
        results = self._results[tower.number]
        answer = tower.desk.compute(
            results, self._feed, stream, given, snapshot=snapshot, amendments=amendments
        )
        self._events.put(answer)

    def _push(self, tower: _Tower, results: Results) -> None:
        tower.desk.sheet.tell("pushing")
        self._add(results)

    def _add(self, results: Results) -> None:
        try:
            results.add_decided()
        except Exception as error:  # the edge of the thread: raised by receive() or collect()
            self._failure = error
            self._events.put(Tick())


class _Tower(threading.Thread):
    """One worker's thread: carries out what is put into its mailbox, in order."""

    def __init__(self, desk: Desk, threads: int) -> None:
        super().__init__(name=f"quorate-tower-{desk.number}", daemon=True)
        self.number = desk.number
        self.desk = desk
        self.mailbox: SimpleQueue[Callable[[Stream], None] | None] = SimpleQueue()
        self._threads = threads

    def run(self) -> None:
        become_compute_thread(self._threads, self.desk.replica.device)
        with suppress(NotWanted), Stream() as stream:  # or it is interrupted
            self.desk.sheet.tell("waiting")
            while (work := self.mailbox.get()) is not None:
                work(stream)
                self.desk.sheet.tell("waiting")

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
