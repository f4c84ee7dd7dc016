"""A crew: members with processes that only pretend, on a clock that a test sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from quorate.errors import UserError, WorkerError
from quorate.transports.processes.decisions import (
    Ask,
    AwaitEnd,
    Close,
    Decision,
    Fail,
    Join,
    Kill,
    Leave,
    Release,
    Say,
    Start,
    Welcome,
)
from quorate.transports.processes.ending import Ending
from quorate.transports.processes.member import State
from quorate.transports.processes.members import Growth, Members
from quorate.transports.worker_status import PHASES, Doing

TIMEOUT_S = 60.0


FIRST, SECOND = 1, 2  # jobs


def doing(phase: str = "forward", since: float = 0.0) -> Doing:
    return Doing(phase, 7, 3, since, dict.fromkeys(PHASES, 0.0), 1)


class Crew:
    """Stands for the shell: carries decisions out on processes that are made up.

    Args:
        members: how many.
        tells_exit: whether a process's exit is reported without asking for it.
        stubborn: whether a process lives on for a while after it was killed.
        gather_s: how long the first ones wait for the others, in the first job.
        least: with how many it begins, if it grows: processes wait for room then.
    """

    def __init__(
        self,
        members: int = 1,
        *,
        tells_exit: bool = True,
        stubborn: bool = False,
        gather_s: float | None = None,
        least: int | None = None,
    ) -> None:
        self.now = 100.0
        self.growth = None if least is None else Growth(least, "there is room")
        devices = [f"cpu:{n}" for n in range(members)]
        self.members = Members(devices, TIMEOUT_S, self.growth)
        self.tells_exit, self.stubborn, self.gather_s = tells_exit, stubborn, gather_s
        self.processes: dict[int, Process] = {}
        self.untold: dict[int, set[int]] = {}  # jobs that are to hear that a member is gone
        self.to_start: set[int] = set()  # decided, and neither done nor failed
        self.jobs: set[int] = set()
        self.starts, self.releases = Counter[int](), Counter[int]()
        self.lines: list[str] = []
        self.leaves: list[Leave] = []
        self.error: UserError | WorkerError | None = None
        for number in range(members):
            self.start(number)

    # --- events -----------------------------------------------------------------------------------

    def start(self, n: int) -> None:
        self.to_start.discard(n)
        assert n not in self.processes, "two processes of a member"
        self.processes[n] = Process(is_placed=self.growth is None)
        self.starts[n] += 1
        is_placed = self.growth is None
        self.members[n].started(self.now, tells_exit=self.tells_exit, is_placed=is_placed)

    def place(self, n: int) -> None:
        self.processes[n].is_placed = True
        self.members[n].placed(self.now)

    def leave(self, n: int) -> None:
        process = self.processes[n]
        was_killed = process.is_killed
        self.members[n].is_to_leave("has left host-b, because Ray drains the node")
        self.do(self.members.hand_over(n))
        assert not process.joined, "a job was not told"
        process.asked.clear()
        process.is_leaving, process.is_killed = True, was_killed

    def cannot_start(self, n: int) -> None:
        self.to_start.remove(n)
        self.do(self.members.cannot_start(n, "no memory", self.now))

    def open(self, job: int) -> None:
        self.jobs.add(job)
        gather_s = self.gather_s if job == FIRST else None
        self.do(self.members.open(job, self.now, gather_s=gather_s))

    def close(self, job: int) -> None:
        self.jobs.remove(job)
        self.do(self.members.close(job))

    def here(self, n: int) -> None:
        self.processes[n].is_here = True
        self.members[n].heard(self.now)
        self.do(self.members.here(n, self.now))

    def ready(self, n: int, job: int) -> None:
        self.processes[n].asked.remove(job)
        self.members[n].heard(self.now)
        self.do(self.members.ready(n, job, self.now))

    def done(self, n: int) -> None:
        self.members[n].heard(self.now)
        self.members[n].computed()

    def refuse(self, n: int) -> None:
        self.members[n].refused("another dataset")

    def cut(self, n: int) -> None:
        self.processes[n].is_cut = True
        self.members[n].wire_cut(self.now)

    def exit(
        self, n: int, code: int, *, changed: str | None = None, phase: str = "forward"
    ) -> None:
        ended = Ending(code, None, "it printed nothing")
        at = doing(phase, self.now - 8.0)
        self.do(self.members.exited(n, ended, at, self.now, changed=changed))

    def replace(self, n: int) -> None:
        self.do(self.members[n].kill("no answer for 8 s"))

    def pass_time(self, seconds: float, computing: Iterable[int] = ()) -> None:
        self.now += seconds
        self.tick(computing)

    def tick(self, computing: Iterable[int] = ()) -> None:
        self.do(self.members.tick(self.now))
        for each in self.members:
            if self.error is not None:
                return  # the transport has raised it, and ticks no further
            self.do(each.tick(self.now, is_computing=each.number in set(computing)))

    def start_up(self, n: int, *jobs: int) -> None:
        if n in self.to_start:
            self.start(n)
        if not self.processes[n].is_placed:
            self.place(n)
        self.here(n)
        for job in jobs:
            self.ready(n, job)

    # --- what was decided -------------------------------------------------------------------------

    def do(self, decided: Iterable[Decision]) -> None:
        for decision in decided:
            assert self.error is None, "a decision after the run has failed"
            match decision:
                case Start(n):
                    assert n not in self.processes
                    assert n not in self.to_start
                    assert self.members[n].given_up is None, "given up, and started again"
                    self.to_start.add(n)
                case Welcome(n):
                    assert self.processes[n].is_here
                case Ask(n, job):
                    assert job in self.jobs
                    assert self.processes[n].is_here
                    self.processes[n].asked.add(job)
                case Close(n, job):
                    process = self.processes[n]
                    process.asked.discard(job)
                    process.joined.discard(job)
                case Join(n, job):
                    assert job in self.jobs
                    assert job not in self.processes[n].joined, "joined twice"
                    self.processes[n].joined.add(job)
                case Leave(n, job):
                    assert job in self.jobs
                    process = self.processes.get(n)
                    (self.untold[n] if process is None else process.joined).remove(job)
                    self.leaves.append(decision)
                case Kill(n):
                    self.processes[n].is_killed = True
                case AwaitEnd(n):
                    process = self.processes[n]
                    if (process.is_killed or process.is_leaving) and not self.stubborn:
                        self.exit(n, -9)
                    else:
                        self.do(self.members[n].still_there(self.now))
                case Release(n):
                    self.untold[n] = self.processes.pop(n).joined
                    self.releases[n] += 1
                case Say(line):
                    self.lines.append(line)
                case Fail(error):
                    self.error = error

    # --- what always holds ------------------------------------------------------------------------

    def check(self) -> None:
        for each in self.members:
            n, state = each.number, each.state
            assert (each.attempt is not None) == (n in self.processes)
            assert self.starts[n] - self.releases[n] == (n in self.processes)  # all wires closed
            if self.error is not None:
                continue  # the run has failed, with all of its jobs
            assert not self.untold.get(n), "gone, and a job was not told"
            if n in self.processes:
                process = self.processes[n]
                assert each.attempt is not None
                assert each.attempt.joined == process.joined
                expected = State.STARTING
                if process.is_killed:
                    expected = State.KILLED
                elif process.is_cut:
                    expected = State.SILENT
                elif process.is_leaving:
                    expected = State.LEAVING
                elif process.joined:
                    expected = State.JOINED
                elif process.is_here:
                    expected = State.READY if each.attempt.ready else State.HERE
                assert state is expected
            else:
                assert (state is State.GIVEN_UP) == (each.given_up is not None)
                assert state is State.GIVEN_UP or each.restart_at is not None or n in self.to_start
            # Nobody is forgotten: who is waited for is so until a time.
            is_due = any(True for _ in each.due(is_computing=False))
            if state in (State.STARTING, State.SILENT, State.WAITING):
                assert is_due or not self.processes[n].is_placed
            if state is State.HERE and self.processes[n].asked:
                assert is_due
        given_up = [each.given_up is not None for each in self.members]
        if isinstance(self.error, WorkerError):
            assert all(given_up)
        elif self.error is None:
            assert not all(given_up)

    def check_that_time_goes_on(self) -> None:
        """What is due is decided: it is not due at the same time again."""
        if self.error is None and self.tells_exit and not self.to_start:
            self.tick()
            assert self.error is not None or all(at > self.now for at in self.members.due())


class Process:
    """A process that is made up."""

    def __init__(self, *, is_placed: bool) -> None:
        self.is_here = self.is_cut = self.is_killed = self.is_leaving = False
        self.is_placed = is_placed
        self.asked: set[int] = set()  # and has not answered
        self.joined: set[int] = set()


KILLED = "was killed by signal 9 (SIGKILL)"
