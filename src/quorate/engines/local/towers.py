"""Towers: workers of this process, with a replica and a thread each.

A tower's thread has a random stream and a number of intra-op threads of its own, and owns the
replica. Replicas stay between steps and between jobs. A single tower has no thread: the calling
thread computes in ``receive``, because two threads would pass the interpreter's lock to and fro.

Towers compute in parallel, because torch's operations release the lock. But a thread that releases
the lock often takes the lock again before another thread is awake: Python hands the lock over only
after five milliseconds of waiting (``sys.getswitchinterval``). With shards of two milliseconds, two
towers then computed in turn, and the coordinator received the result of a shard with the end of the
next shard, so that shards were computed twice. So waits are short while towers compute.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from queue import SimpleQueue

from quorate.coordination.protocol import Compute, Event, Joined
from quorate.data.feed import Feed
from quorate.engines.job import Job, NotWanted, OriginalModel
from quorate.engines.job_channel import JobChannel, Request, StepSums
from quorate.engines.model_changes import ModelChanges
from quorate.engines.shard_runner import ShardRunner
from quorate.engines.users_line import users_frame
from quorate.engines.worker_status import Timesheet, WorkerStatus
from quorate.machine.devices import Group
from quorate.machine.freed_memory import keep_freed_memory, return_freed_memory
from quorate.machine.limits import ABANDONED_S, THREAD_EXIT_S
from quorate.machine.shared_setting import SharedSetting
from quorate.machine.signal_handlers import ends_program
from quorate.replica.buffers import Buffers
from quorate.replica.compute_thread import as_compute_thread, become_compute_thread, end_threads
from quorate.replica.replica import Replica
from quorate.replica.snapshots import new_snapshots
from quorate.replica.streams import Stream

WAIT_S = 2e-4  # a shorter wait costs more for switches than the wait saves

_waits_s = SharedSetting(sys.getswitchinterval, sys.setswitchinterval)


class Towers:
    """A worker per device entry.

    Args:
        groups: the devices of each tower.
        make_replica: makes the replica of a tower, in the calling thread.
        buffers: of the coordinator's model.
        threads: intra-op threads of each tower. The bits of a matrix product depend on the number.
        say: shows a line to the user. Default: logs the line.
        original: the coordinator's model.
    """

    can_replace = False  # a thread cannot be ended
    takes_runs = True
    have_threads = True  # whether several towers have threads

    def __init__(
        self,
        groups: Sequence[Group],
        make_replica: Callable[[Group], Replica],
        buffers: Buffers,
        *,
        threads: int,
        original: OriginalModel,
        say: Callable[[str], None] | None = None,
    ) -> None:
        if any(group[0].type == "cpu" for group in groups):
            keep_freed_memory()
        self._say = say or logging.getLogger("quorate").warning
        kind = ThreadTower if self.have_threads and len(groups) > 1 else CallerTower
        self.original = original
        self.towers: list[Tower] = []
        for number, group in enumerate(groups):
            sheet = Timesheet()  # written by the tower's thread, once the thread runs
            sheet.tell("starting")
            replica = make_replica(group)
            runner = ShardRunner(number, replica, sheet, original.frozen, raises=ends_program)
            self.towers.append(kind(runner, threads))
        self.threads = threads
        self.buffers = buffers
        self._started = False
        self._waits = ExitStack()

    @property
    def replicas(self) -> list[Replica]:
        """The replica of each tower."""
        return [tower.runner.replica for tower in self.towers]

    def can_compute(self, dataset: object) -> bool:  # noqa: ARG002
        """Return True: towers have all datasets of this process."""
        return True

    def open(self, job: Job) -> TowersChannel:
        """Begin a job, in the thread of the training loop; the first job starts the threads."""
        channel = TowersChannel(job, self)
        # Threads start after the channel, whose feed may fork: a fork with threads is unsafe.
        if self._threads and not self._started:
            self._waits.enter_context(_waits_s.at(min(sys.getswitchinterval(), WAIT_S)))
        self._started = True
        for tower in self.towers:
            tower.begin()
            channel.post(Joined(tower.runner.number))
        return channel

    def status(self) -> list[WorkerStatus]:
        """Return the status of each tower. Thread-safe."""
        return [
            WorkerStatus(w.number, str(w.replica.group), None, t.native_id, *w.sheet.read())
            for t, w in ((tower, tower.runner) for tower in self.towers)
        ]

    def close(self) -> None:
        """End the threads; a busy thread is interrupted between two operations, after a while."""
        self._waits.close()
        for tower in self.towers:
            tower.end()
        threads = self._threads if self._started else []
        # After a second Ctrl-C hardly at all. The channel is closed, and expects no answer.
        at_once = isinstance(sys.exc_info()[1], (KeyboardInterrupt, SystemExit))
        wait_s = ABANDONED_S if at_once else THREAD_EXIT_S
        for thread in end_threads(threads, NotWanted, wait_s, wait_s):
            # An interpreter that ends during a long operator of a thread aborts.
            atexit.register(thread.join, THREAD_EXIT_S)
            self._say(f"worker {thread.runner.number} did not stop, {thread.held_by()}")
        return_freed_memory()

    @property
    def _threads(self) -> list[ThreadTower]:
        return [tower for tower in self.towers if isinstance(tower, ThreadTower)]


class TowersChannel(JobChannel):
    """A job's channel to towers. Each tower adds its own results.

    Args:
        job: the job.
        workers: all towers.
    """

    def __init__(self, job: Job, workers: Towers) -> None:
        replicas, snapshots = workers.replicas, None
        self._towers = towers = workers.towers
        self._caller = towers[0] if isinstance(towers[0], CallerTower) and not towers[1:] else None
        if job.on_snapshots and self._caller is None:
            snapshots = new_snapshots(job.parameters, workers.buffers, len(towers))
        super().__init__(job, [StepSums(job.plan, r.recycle) for r in replicas], snapshots)
        # Called for each request, or, for a single tower, when the request is carried out.
        self._model_changes = workers.original.model_changes
        self._feed = job.feed(moves_to=replicas[0].device)

    def receive(self, timeout_s: float | None) -> Event | None:
        """Return the next event, or None after ``timeout_s`` seconds. Blocks."""
        if self._caller is not None and self.inbox.empty():
            self._caller.run()
        return super().receive(timeout_s)

    def close(self) -> None:
        """End the job. Towers stay."""
        self._feed.close()

    def _request(self, effect: Compute, request: Request) -> None:
        tower = self._towers[effect.worker]
        # A single tower computes in ``receive``, from the model as the model is then.
        changes = None if self._caller is not None else self._model_changes()
        tower.compute(partial(self._run_shards, tower.runner, request, changes))

    def _run_shards(
        self, runner: ShardRunner, request: Request, changes: ModelChanges | None, stream: Stream
    ) -> None:
        """Compute the shards of a request, in the tower's thread.

        Args:
            changes: of the coordinator's model, when the request was sent; None: until now.
        """

        def rows() -> Feed:
            if (known := changes or self._model_changes()) is not None:
                runner.changes.take(known)
                runner.replica.loss_call.shared.take(known.shared)
            return self._feed

        outcome = runner.run(
            *(self.job, rows, stream, request.step, request.shard, [None] * request.count),
            # The caller's tower ends its shards before the caller can cancel any.
            is_cancelled=None if self._caller is not None else lambda: request.is_cancelled,
            snapshot=request.snapshot,
        )
        self.inbox.put((runner.number, outcome, runner.sheet.recorded(cuts=True)))

    def _decided(self, worker: int) -> None:
        if self._sums[worker].has_kept:
            self._towers[worker].do(self._sums[worker].add_kept)


class CallerTower:
    """A tower whose shards the calling thread computes."""

    def __init__(self, runner: ShardRunner, threads: int) -> None:
        self.runner = runner
        self.native_id: int | None = None  # the kernel's number of the thread
        self._compute_thread = as_compute_thread(threads, runner.replica.device)
        self._stream = Stream()
        self._work: Callable[[Stream], None] | None = None

    def begin(self) -> None:
        """Note that the calling thread computes from now on."""
        self.native_id = threading.get_native_id()
        self.runner.sheet.tell("waiting")

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
            self.runner.sheet.tell("waiting")

    def end(self) -> None:
        """Free the memory that the replica keeps for the next shard."""
        self.native_id = None
        self.runner.replica.close()


class ThreadTower(threading.Thread):
    """A tower's thread, which carries out the work of its mailbox in order."""

    def __init__(self, runner: ShardRunner, threads: int) -> None:
        super().__init__(name=f"quorate-tower-{runner.number}", daemon=True)
        self.runner = runner
        self._mailbox: SimpleQueue[Callable[[Stream], None] | None] = SimpleQueue()
        self._threads = threads

    def begin(self) -> None:
        """Start the thread, unless the thread has started."""
        if self.ident is None:
            self.start()

    def do(self, work: Callable[[], None]) -> None:
        """Put short work into the mailbox."""

        def push(_: Stream) -> None:
            self.runner.sheet.tell("pushing")
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
        become_compute_thread(self._threads, self.runner.replica.device)
        with suppress(NotWanted), Stream() as stream:  # ``Towers.close`` may raise NotWanted here
            self.runner.sheet.tell("waiting")
            while (work := self._mailbox.get()) is not None:
                work(stream)
                self.runner.sheet.tell("waiting")

    def held_by(self) -> str:
        """Return in words why the thread does not end."""
        frame = sys._current_frames().get(self.ident or 0)
        found = None if frame is None else users_frame(traceback.walk_stack(frame))
        where = ""
        if found is not None:
            code, line = found[0].f_code, found[1]
            where = f": {code.co_filename}, line {line}, in {code.co_name}"
        return (
            f"because your code is still running{where}; the program can exit only after your code "
            "returns"
        )


Tower = CallerTower | ThreadTower
