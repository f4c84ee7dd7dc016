"""The supervisor of worker processes: starts, monitors, restarts and ends the workers of a run.

    no process --start--> starting --here--> at the loop --ready--> ready ----> joined
                             |                   |                    |            |
                             +-------------------+---------+----------+------------+
                                                           |  meanwhile silent (the socket is cut),
                                                           |  killed by the coordinator, or leaving
                                                           |  (the node is about to end)
                                                         ended
                                                           |
                                       waiting for a restart, or given up

A ``WorkerLife`` is the history of a worker's number, a ``ProcessLife`` a single process of the
worker. The supervisor starts processes in a ``WorkerPool``, and reports to ``Processes``, which has
the jobs, who takes part in a job. Tests pass made-up pools and jobs, and a clock of their own.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from selectors import BaseSelector
from typing import TYPE_CHECKING

from quorate.coordination.run_event import BACK, JOINED, LOST, RunEvent
from quorate.engines.processes import endings
from quorate.engines.processes import worker_messages as messages
from quorate.engines.processes.endings import Ending
from quorate.engines.processes.pool import WorkerHandle, WorkerPool
from quorate.engines.processes.script_as_worker import ScriptException, raised_in
from quorate.engines.worker_status import Doing
from quorate.errors import UserError, WorkerError
from quorate.machine import limits
from quorate.machine.resources import oom_kills

if TYPE_CHECKING:
    from quorate.engines.processes.transport import Processes


@dataclass
class RestartBudget:
    """The budget of restarts of a worker's number.

    After a computed shard the restart follows at once, however often somebody kills the process.
    A worker without a computed shard waits longer each time, until the worker is given up.

    Args:
        killed: starts in a row that may end in a kill before a shard is computed.
        failed: the same for processes that end by themselves: the script is likely to end in the
            same way again.
        longest_s: bound on the delay; the delay begins with 0.1 s and doubles.
    """

    killed: int = 20
    failed: int = 3
    longest_s: float = 5.0
    computed_in_all: int = 0  # shards
    in_vain: int = 0  # starts in a row that ended before a shard was computed
    by_itself: int = 0  # of these, not killed

    def note_shard(self) -> None:
        """Note a computed shard: the start was not in vain."""
        self.computed_in_all += 1
        self.in_vain = self.by_itself = 0

    def delay_s(self, *, killed: bool) -> float | None:
        """Return the seconds from an end until the next start; None: give up the worker."""
        delay_s = 0.0 if self.in_vain == 0 else min(self.longest_s, 0.05 * 2.0**self.in_vain)
        self.in_vain += 1
        self.by_itself += not killed
        if self.in_vain > self.killed or self.by_itself >= self.failed:
            return None
        return delay_s


@dataclass
class ProcessLife:
    """A process of a worker, from the start to the end."""

    handle: WorkerHandle
    heard_at: float  # of the start, of an invitation, or of the last message
    is_at_loop: bool = False  # whether the script has reached its training loop
    # The job that awaits the worker's answer. A job that is over stays: a stopped worker is found
    # out however short the jobs are.
    invited: int | None = None
    ready: set[int] = field(default_factory=set)  # jobs that the worker may join
    joined: set[int] = field(default_factory=set)  # jobs
    silent_since: float | None = None  # since when the socket is cut
    kill_reason: str | None = None  # why the coordinator killed the process
    refusal: str | None = None  # why the worker cannot take part: a mistake of the script
    raised: ScriptException | None = None  # by the script, before its training loop
    departure: str | None = None  # why a healthy worker has to end: "has left host, because ..."
    has_handed_over: bool = False  # whether a departing worker has no more to do

    def is_victim(self, ending: Ending) -> bool:
        """Return whether an outsider killed the process: not the coordinator, nor the process."""
        return self.refusal is None and self.kill_reason is None and ending.is_kill

    def end_text(self, ending: Ending, doing: Doing, where: str, now: float) -> str:
        """Return how and where the process ended: "was killed by signal 9 in step 3, ..."."""
        if self.has_handed_over:
            assert self.departure is not None
            return self.departure
        how = self.refusal or self.kill_reason or ending.text(had_joined=bool(self.joined))
        if self.raised is not None and not (self.refusal or self.kill_reason):
            how = f"raised {self.raised.text} while starting"
        if not self.joined:
            return f"{how} while starting" if self.is_victim(ending) else how
        overdue_s = None if self.kill_reason is None else now - doing.since
        return endings.at_work(how, doing, where, overdue_s)


@dataclass
class WorkerLife:
    """A worker's number, through all processes of the worker."""

    number: int
    devices: str  # in words
    process: ProcessLife | None = None  # other threads may read the attribute, once
    budget: RestartBudget = field(default_factory=RestartBudget)
    restart_at: float | None = None
    lost_at: float | None = None  # since when the worker takes part in nothing
    given_up: str | None = None  # why no process is started any more


@dataclass(eq=False)
class Supervisor:
    """All workers of a run, with their invitations to jobs.

    Args:
        pool: starts the processes.
        jobs: the jobs of the run.
        selector: gets each process's events; the data of ready keys are called.
        devices: of each worker, in words.
        timeout_s: the time for a worker to reach the training loop, and to answer there.
        say: shows a line to the user.
        edited_file: returns a file of the script edited during the run; None: no file.
        clock: returns the time in seconds.
    """

    pool: WorkerPool
    jobs: Processes
    selector: BaseSelector
    devices: InitVar[Sequence[str]]
    timeout_s: float
    say: Callable[[str], None]
    edited_file: Callable[[], str | None]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self, devices: Sequence[str]) -> None:
        self.workers = [WorkerLife(number, text) for number, text in enumerate(devices)]
        self._open_jobs: list[int] = []
        self._gather_until: float | None = None  # no update was made yet
        self._report_shortage_at: float | None = None  # infinity: the user knows
        self._raised: set[str] = set()  # by the script, in workers that were starting
        self._oom_kills = oom_kills()  # as far as they are explained
        self._tick_at = 0.0  # an answer to a shard does not cost a look at all workers

    def start(self) -> None:
        """Start a process for each worker.

        Raises:
            OSError: a process cannot be started.
        """
        for life in self.workers:
            self._start(life)

    def close(self) -> None:
        """End all workers: idle workers end at once, the rest is killed."""
        handles = [process.handle for process in self._processes()]
        for handle in handles:
            handle.post(messages.EndWorker())
        # After a second Ctrl-C nobody waits.
        at_once = isinstance(sys.exc_info()[1], (KeyboardInterrupt, SystemExit))
        deadline = self.clock() + (0.0 if at_once else limits.WORKER_EXIT_S)
        for handle in handles:
            # A kill before the fork would end the rest too.
            if handle.pid is not None:
                handle.wait(max(0.0, deadline - self.clock()))
        for life in self.workers:
            self._release(life)

    def pump(self, timeout_s: float | None) -> None:
        """Wait for news of any worker, at most so long, and do everything due.

        Raises:
            WorkerError: no worker is left, and no more are started.
            UserError: workers cannot be started again from this script.
        """
        limit_s = limits.SUPERVISOR_POLL_S
        timeout_s = limit_s if timeout_s is None else min(limit_s, timeout_s)
        for key, _ in self.selector.select(timeout_s):
            key.data()
        self.pool.flush()
        if self.clock() >= self._tick_at:
            self.tick()

    # --- jobs -------------------------------------------------------------------------------------

    def open(self, job: int, *, gather_s: float | None = None) -> None:
        """Invite all workers to a job.

        Args:
            gather_s: how long ready workers wait for the rest; None: not at all.
        """
        self._open_jobs.append(job)
        if gather_s is not None:
            self._gather_until = self.clock() + gather_s
        for life in self.workers:
            self._invite(life)

    def end(self, job: int) -> None:
        """End a job. A worker still busy with a further job hears of the end later."""
        self._open_jobs.remove(job)
        for process in self._processes():
            if job in {process.invited, *process.ready, *process.joined}:
                process.ready.discard(job)
                process.joined.discard(job)
                process.handle.post(messages.CloseJob(job))

    def kill(self, number: int, reason: str) -> None:
        """Kill a worker's process, if there is any. A new process follows after the end."""
        process = self.workers[number].process
        if process is not None:
            process.kill_reason = reason
            process.handle.kill()

    def handle(self, number: int) -> WorkerHandle | None:
        """Return the handle of a worker's process; None without a process. Thread-safe."""
        process = self.workers[number].process  # read once: another thread may end the process
        return None if process is None else process.handle

    # --- news of a process ------------------------------------------------------------------------

    def hear(self, life: WorkerLife) -> None:
        """Take all messages of a worker's process."""
        process = life.process
        if process is None or process.silent_since is not None:
            return  # the end was handled in the same round
        process.handle.flush()
        for message in process.handle.arrived():
            self._receive(life, process, message)
        if process.handle.is_cut:  # the process is about to end, and its exit code says why
            process.silent_since = self.clock()

    def look(self, life: WorkerLife) -> None:
        """Handle the end of a worker's process, if the process has ended."""
        if life.process is not None and life.process.handle.has_ended():
            self._ended(life, life.process)

    def _receive(
        self, life: WorkerLife, process: ProcessLife, message: messages.WorkerMessage
    ) -> None:
        process.heard_at = self.clock()  # the worker is alive: the time to answer begins anew
        match message:
            case messages.ShardsDone():
                for number in (life.number, *(other for other, _ in message.others)):
                    self.workers[number].budget.note_shard()
                self.jobs.receive(life.number, message)
            case messages.ShardFailed() | messages.ShardsCancelled() | messages.FoundNote():
                self.jobs.receive(life.number, message)
            case messages.WorkerPlaced():
                process.handle.is_placed = True
            case messages.WorkerLeaves(reason):
                process.departure = reason
            case messages.ScriptRefused(mistake):
                process.refusal = mistake
            case messages.ScriptRaised():
                process.raised = raised_in(life.number, message)
            case messages.ReachedLoop() if not process.has_handed_over:
                process.is_at_loop = True
                self.jobs.welcome(process.handle)
                self._invite(life)
            case messages.JobReady(job):
                if self.jobs.accepts(process.handle, message):
                    self._ready(life, process, job)
                    self._invite(life)
        is_leaving = process.departure is not None and not process.has_handed_over
        if is_leaving and not self.jobs.is_computing(life.number):
            self._hand_over(life, process)

    def _invite(self, life: WorkerLife) -> None:
        """Invite a worker to an open job, and to the next job after the answer.

        Job after job may begin and end while a worker is stopped: unsent messages do not pile up.
        """
        process = life.process
        if process is None or not process.is_at_loop or process.has_handed_over:
            return
        known = process.ready | process.joined
        job = next((job for job in self._open_jobs if job not in known), None)
        if process.invited is None and job is not None:
            process.invited, process.heard_at = job, self.clock()
            self.jobs.invite(process.handle, job)

    def _ready(self, life: WorkerLife, process: ProcessLife, job: int) -> None:
        if process.invited != job:
            return
        process.invited = None
        if job not in self._open_jobs:
            return  # the job is over
        process.ready.add(job)
        is_new = life.budget.computed_in_all == 0 and not process.joined
        is_late = self.pool.elastic is not None and self._gather_until is None
        self._let_join()
        if life.lost_at is not None:
            away_s, life.lost_at = self.clock() - life.lost_at, None
            back = f"worker {life.number} is back after {away_s:.1f} s"
            self.say(RunEvent(back, BACK, life.number))
        elif is_late and is_new and process.joined:
            count = sum(bool(each.joined) for each in self._processes())
            come = f"worker {life.number} has joined: {count} take part"
            self.say(RunEvent(come, JOINED, life.number))

    def _let_join(self) -> None:
        """Let ready workers begin; at first when all are ready, or have had time enough."""
        if self._gather_until is not None:
            if self._is_gathering(self._gather_until):
                return
            self._gather_until = None
        for process in self._processes():
            jobs, process.ready = sorted(process.ready), set()
            process.joined.update(jobs)
            for job in jobs:
                self.jobs.channels[job].joined(process.handle.number, process.handle.place)

    def _hand_over(self, life: WorkerLife, process: ProcessLife) -> None:
        """Let an idle worker leave: jobs are told before the process ends."""
        process.has_handed_over = True
        what = f"worker {life.number} ({life.devices}) {process.departure}"
        for job in sorted(process.joined):
            self.jobs.channels[job].left(life.number, what, crashed=False)
        process.invited, process.ready, process.joined = None, set(), set()
        process.handle.kill()

    # --- starts and ends --------------------------------------------------------------------------

    def _start(self, life: WorkerLife) -> None:
        life.restart_at = None
        handle = self.pool.start(life.number)
        life.process = ProcessLife(handle, self.clock())
        handle.watch(self.selector, partial(self.hear, life), partial(self.look, life))

    def _restart(self, life: WorkerLife) -> None:
        try:
            self._start(life)
        except OSError as error:
            self._release(life)  # a selector may have no room
            self._lost(life, f"worker {life.number} cannot be started: {error}", killed=False)

    def _release(self, life: WorkerLife) -> None:
        """Close the handle of a process, and end the process."""
        process, life.process = life.process, None
        if process is not None:
            process.handle.close()
            self.jobs.released(life.number)

    def _ended(self, life: WorkerLife, process: ProcessLife) -> None:
        for message in process.handle.arrived():  # messages sent before the end count
            self._receive(life, process, message)
        ending, now = process.handle.ending(), self.clock()
        if process.kill_reason is None:
            unexplained, ending = ending, ending.explained(self._oom_kills)
            self._oom_kills += ending is not unexplained  # several may have been killed meanwhile
        doing, where = self.jobs.last_shard(life.number)
        how = process.end_text(ending, doing, where, now)
        what = f"worker {life.number} ({life.devices}) {how}"
        self._release(life)
        if not any(each.budget.computed_in_all for each in self.workers):
            if process.refusal is not None:
                raise UserError(process.refusal)
            if process.raised is not None:
                # Twice the same is no accident: the script does not run in workers.
                if process.raised.text in self._raised:
                    raise process.raised.error
                self._raised.add(process.raised.text)
        killed = process.is_victim(ending)
        # A worker that was still waiting has not begun its shard: the shard is not to blame.
        crashed = not killed and doing.phase != "waiting"
        for job in sorted(process.joined):
            self.jobs.channels[job].left(life.number, what, crashed=crashed)
        # A process that ran out of memory is likely to do so again.
        killed = killed and not ending.is_out_of_memory
        self._lost(life, what, killed=killed, can_restart=process.refusal is None)
        self._let_join()  # one worker less to wait for

    def _lost(self, life: WorkerLife, what: str, *, killed: bool, can_restart: bool = True) -> None:
        """Start another process in a worker's place, now or later, or give up the worker."""
        now = self.clock()
        life.lost_at = now if life.lost_at is None else life.lost_at
        delay_s = life.budget.delay_s(killed=killed) if can_restart else None
        if (file := self.edited_file()) is not None:
            delay_s = None
            what += f"; {endings.script_edited(file)}"
        elif delay_s is None and killed:
            what += f"; {endings.PROBABLY_MEMORY}"
        if delay_s is not None:
            life.restart_at, self._tick_at = now + delay_s, now
        else:
            life.given_up = what
            if all(each.given_up is not None for each in self.workers):
                raise WorkerError(endings.nobody_left(str(each.given_up) for each in self.workers))
        outcome = endings.CONTINUES_WITHOUT if delay_s is None else endings.ANOTHER_STARTS
        self.say(RunEvent(f"{what}; {outcome}", LOST, life.number))

    # --- time -------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Do everything due now."""
        now, computing = self.clock(), self.jobs.computing()
        self._tick_at = now + limits.SUPERVISOR_POLL_S
        self._tick_group(now)
        for life in self.workers:
            if self._due(life, computing) <= now:
                self._act(life, now)

    def _due(self, life: WorkerLife, computing: frozenset[int]) -> float:
        """Return when there is something to do about a worker without news."""
        process = life.process
        if process is None:
            return math.inf if life.restart_at is None else life.restart_at
        if process.silent_since is not None:
            return process.silent_since + limits.WORKER_SILENCE_S
        waits_for_room = self.pool.elastic is not None and not process.handle.is_placed
        if process.kill_reason is not None or life.number in computing or waits_for_room:
            return math.inf
        is_awaited = not process.is_at_loop or process.invited is not None
        return process.heard_at + self.timeout_s if is_awaited else math.inf

    def _act(self, life: WorkerLife, now: float) -> None:
        """Do everything due about a worker."""
        process = life.process
        if process is None:
            self._restart(life)
        elif process.silent_since is None:
            stages = {"is_placed": process.handle.is_placed, "is_at_loop": process.is_at_loop}
            self.kill(life.number, endings.overdue(self.timeout_s, **stages))
        else:
            if process.kill_reason is None:
                self.kill(life.number, endings.SOCKET_CLOSED)
            process.silent_since = now
            # The fork server may hang, and report no end ever.
            if process.handle.wait(limits.WORKER_EXIT_S):
                self._ended(life, process)

    # --- the group --------------------------------------------------------------------------------

    def _processes(self) -> list[ProcessLife]:
        return [life.process for life in self.workers if life.process is not None]

    def _is_gathering(self, until: float) -> bool:
        """Return whether ready workers wait for the rest."""
        processes = self._processes()
        if self.pool.elastic is not None:
            processes = [process for process in processes if process.handle.is_placed]
        is_early = self.clock() < until and not all(process.ready for process in processes)
        return is_early or self._shortage() is not None

    def _shortage(self) -> tuple[int, int] | None:
        """Return the numbers of present and needed workers; None: enough, or no hope of more.

        The start needs more workers than the rest of the run.
        """
        if self.pool.elastic is None or not self._open_jobs:
            return None
        able = sum(life.given_up is None for life in self.workers)
        enough = min(able, 1 if self._gather_until is None else self.pool.elastic.least)
        present = sum(bool(process.ready or process.joined) for process in self._processes())
        return (present, enough) if present < enough else None

    def _tick_group(self, now: float) -> None:
        shortage = self._shortage()
        if self.pool.elastic is None or shortage is None:
            self._report_shortage_at = None
            self._let_join()
        elif self._report_shortage_at is None:
            self._report_shortage_at = now + limits.FIRST_WORKERS_S
        elif self._report_shortage_at <= now:
            self._report_shortage_at = math.inf
            pending = sum(not process.handle.is_placed for process in self._processes())
            self.say(endings.too_few(*shortage, pending, self.pool.elastic.room))
