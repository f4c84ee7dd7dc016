"""What becomes of members: every short order of events, long ones drawn; how often they start.

No run reaches most of these orders: workers end, are silent, late and killed at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quorate.engines.processes import decisions as to
from quorate.engines.processes.decisions import Decision
from quorate.engines.processes.endings import Ending
from quorate.engines.processes.member import State
from quorate.engines.processes.restarts import Restarts
from quorate.engines.processes.supervisor import ElasticSize, Supervisor
from quorate.engines.worker_status import PHASES, Doing
from quorate.errors import UserError, WorkerError
from quorate.machine.limits import FIRST_WORKERS_S, WORKER_SILENCE_S

Event = tuple[object, ...]
CODES = (0, 3, -9, -11)
FIRST, SECOND = 1, 2  # jobs
TIMEOUT_S = 60.0


@dataclass
class Process:
    """A process that is made up."""

    is_placed: bool
    is_here: bool = False
    is_cut: bool = False
    is_killed: bool = False
    is_leaving: bool = False
    asked: set[int] = field(default_factory=set)  # jobs that it has not answered
    joined: set[int] = field(default_factory=set)


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
        self.growth = None if least is None else ElasticSize(least, "there is room")
        devices = [f"cpu:{n}" for n in range(members)]
        self.members = Supervisor(devices, TIMEOUT_S, self.growth)
        self.tells_exit, self.stubborn, self.gather_s = tells_exit, stubborn, gather_s
        self.processes: dict[int, Process] = {}
        self.untold: dict[int, set[int]] = {}  # jobs that are to hear that a member is gone
        self.to_start: set[int] = set()  # decided, and neither done nor failed
        self.jobs: set[int] = set()
        self.starts, self.releases = Counter[int](), Counter[int]()
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

    def exit(self, n: int, code: int) -> None:
        at = Doing("forward", 7, 3, self.now - 8.0, dict.fromkeys(PHASES, 0.0), 1)
        self.do(self.members.exited(n, Ending(code, None, "nothing"), at, self.now, changed=None))

    def replace(self, n: int) -> None:
        self.do(self.members[n].kill("no answer for 8 s"))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.tick()

    def tick(self) -> None:
        self.do(self.members.tick(self.now))
        for each in self.members:
            if self.error is not None:
                return  # the transport has raised it, and ticks no further
            self.do(each.tick(self.now, is_computing=False))

    # --- what was decided -------------------------------------------------------------------------

    def do(self, decided: Iterable[Decision]) -> None:
        for decision in decided:
            assert self.error is None, "a decision after the run has failed"
            match decision:
                case to.Start(n):
                    assert n not in self.processes
                    assert n not in self.to_start
                    assert self.members[n].given_up is None, "given up, and started again"
                    self.to_start.add(n)
                case to.Welcome(n):
                    assert self.processes[n].is_here
                case to.Ask(n, job):
                    assert job in self.jobs
                    assert self.processes[n].is_here
                    self.processes[n].asked.add(job)
                case to.Close(n, job):
                    process = self.processes[n]
                    process.asked.discard(job)
                    process.joined.discard(job)
                case to.Join(n, job):
                    assert job in self.jobs
                    assert job not in self.processes[n].joined, "joined twice"
                    self.processes[n].joined.add(job)
                case to.Leave(n, job):
                    assert job in self.jobs
                    process = self.processes.get(n)
                    (self.untold[n] if process is None else process.joined).remove(job)
                case to.Kill(n):
                    self.processes[n].is_killed = True
                case to.AwaitEnd(n):
                    process = self.processes[n]
                    if (process.is_killed or process.is_leaving) and not self.stubborn:
                        self.exit(n, -9)
                    else:
                        self.do(self.members[n].still_there(self.now))
                case to.Release(n):
                    self.untold[n] = self.processes.pop(n).joined
                    self.releases[n] += 1
                case to.Say(_):
                    pass
                case to.Fail(error):
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
            if each.attempt is not None:
                process = self.processes[n]
                assert each.attempt.joined == process.joined
                holds = {
                    State.KILLED: process.is_killed,
                    State.SILENT: process.is_cut,
                    State.LEAVING: process.is_leaving,
                    State.JOINED: bool(process.joined),
                    State.READY: process.is_here and bool(each.attempt.ready),
                    State.HERE: process.is_here,
                    State.STARTING: True,
                }
                assert state is next(expected for expected in holds if holds[expected])
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


def possible(crew: Crew, *, times: tuple[float, ...]) -> Iterator[Event]:
    """All that can happen next."""
    if crew.error is not None:
        return
    for n, process in crew.processes.items():
        if not process.is_placed:
            yield "place", n
        elif not process.is_cut:
            if not process.is_here:
                yield "here", n
            if not process.is_leaving:
                yield "leave", n
            for job in sorted(process.asked):
                yield "ready", n, job
            yield "cut", n
            yield "refuse", n
            if process.joined:
                yield "done", n
        yield "replace", n
        for code in CODES:
            yield "exit", n, code
    for n in sorted(crew.to_start):
        yield "start", n
        yield "cannot_start", n
    for job in (FIRST, SECOND):
        yield ("close" if job in crew.jobs else "open"), job
    for seconds in times:
        yield "pass_time", seconds


def happen(crew: Crew, event: Event) -> None:
    name, *arguments = event
    getattr(crew, str(name))(*arguments)
    crew.check()


def sequences(first: list[Event], depth: int, **options: bool) -> Iterator[list[Event]]:
    """All orders of events of a length, after some first ones."""
    crew = Crew(1, **options)  # type: ignore[arg-type]
    for event in first:
        happen(crew, event)
    events = list(possible(crew, times=(TIMEOUT_S,)))
    crew.check_that_time_goes_on()
    if depth == 0:
        yield first
        return
    for event in events:
        if event in (("open", SECOND), ("close", SECOND)):
            continue
        yield from sequences([*first, event], depth - 1, **options)


@pytest.mark.parametrize("tells_exit", [True, False])
@pytest.mark.parametrize(
    ("first", "depth"),
    [
        ([], 4),
        ([("open", FIRST), ("here", 0)], 3),
        ([("open", FIRST), ("here", 0), ("ready", 0, FIRST)], 3),
        ([("open", FIRST), ("here", 0), ("ready", 0, FIRST), ("cut", 0)], 4),
        ([("exit", 0, -9), ("pass_time", 0.0)], 4),
    ],
    ids=["start", "here", "joined", "silent", "lost"],
)
def test_every_short_order_of_events(first: list[Event], depth: int, tells_exit: bool) -> None:
    count = sum(1 for _ in sequences(first, depth, tells_exit=tells_exit))
    assert count > 50


@given(
    st.data(),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, FIRST_WORKERS_S]),
    st.sampled_from([None, 1, 2]),
)
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_long_histories_of_several_members(
    data: st.DataObject,
    members: int,
    tells_exit: bool,
    stubborn: bool,
    gather_s: float | None,
    least: int | None,
) -> None:
    told = {"tells_exit": tells_exit, "stubborn": stubborn}
    crew = Crew(members, gather_s=gather_s, least=least and min(least, members), **told)
    for _ in range(60):
        events = list(possible(crew, times=(0.0, 0.3, WORKER_SILENCE_S, TIMEOUT_S)))
        if not events:
            break
        happen(crew, data.draw(st.sampled_from(events)))
    crew.check_that_time_goes_on()


# --- how often one is started again ---------------------------------------------------------------


@given(
    # None: it computes a shard; True: it is killed; False: it ends by itself.
    st.lists(st.sampled_from([None, True, False]), max_size=60),
    st.integers(1, 8),
    st.integers(1, 4),
)
def test_the_budget_is_of_starts_in_vain(
    events: list[bool | None], killed: int, failed: int
) -> None:
    restarts = Restarts(killed=killed, failed=failed)
    in_vain: list[bool] = []  # since it last computed
    for killed_now in events:
        if killed_now is None:
            restarts.computed()
            in_vain = []
            continue
        delay_s = restarts.ended(killed=killed_now)
        given_up = len(in_vain) + 1 > killed or [*in_vain, killed_now].count(False) >= failed
        assert (delay_s is None) == given_up
        if given_up:
            return
        assert (delay_s == 0) == (not in_vain)  # one that was at work is missed at once
        in_vain.append(killed_now)
