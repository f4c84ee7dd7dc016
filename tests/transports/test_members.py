"""What becomes of workers, in every order of events: no process, wire or clock is in it."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quorate.errors import UserError, WorkerError
from quorate.transports.as_worker.raised import Raised
from quorate.transports.processes import decisions, ending, member, members, restarts
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
from quorate.transports.processes.member import SILENT_S, State
from quorate.transports.processes.members import GATHER_S, Growth, Members
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
        self.members[n].is_to_leave("has left host-b, which Ray drains")
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


# --- every order of events ------------------------------------------------------------------------

Event = tuple[object, ...]
CODES = (0, 3, -9, -11)


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
        ([], 5),
        ([("open", FIRST), ("here", 0)], 4),
        ([("open", FIRST), ("here", 0), ("ready", 0, FIRST)], 4),
        ([("open", FIRST), ("here", 0), ("ready", 0, FIRST), ("cut", 0)], 5),
        ([("exit", 0, -9), ("pass_time", 0.0)], 5),
    ],
    ids=["start", "here", "joined", "silent", "lost"],
)
def test_every_short_order_of_events(first: list[Event], depth: int, tells_exit: bool) -> None:
    count = sum(1 for _ in sequences(first, depth, tells_exit=tells_exit))
    assert count > 1000


@given(
    st.data(),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, GATHER_S]),
    st.sampled_from([None, 1, 2]),
)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
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
        events = list(possible(crew, times=(0.0, 0.3, SILENT_S, TIMEOUT_S)))
        if not events:
            break
        happen(crew, data.draw(st.sampled_from(events)))
    crew.check_that_time_goes_on()


# --- how an end is worded -------------------------------------------------------------------------

KILLED = "was killed by signal 9 (SIGKILL)"


@pytest.mark.parametrize(
    ("code", "phase", "line"),
    [
        (3, "forward", "ended with exit code 3 in step 7, shard 3, forward"),
        (0, "waiting", "ended with exit code 0"),
        (-9, "backward", f"{KILLED} in step 7, shard 3, backward"),
        (-9, "waiting", KILLED),
        (-11, "pushing", "was killed by signal 11 (SIGSEGV) in step 7, shard 3, pushing"),
        (-99, "fetching", "was killed by signal 99 in step 7, shard 3, fetching"),
    ],
)
def test_the_end_of_one_at_work(code: int, phase: str, line: str) -> None:
    crew = Crew(2)
    crew.open(FIRST)
    crew.start_up(1, FIRST)
    crew.exit(1, code, phase=phase)
    what = f"worker 1 (cpu:1) {line}"
    assert crew.leaves == [Leave(1, FIRST, what, crashed=code != -9)]
    assert crew.lines == [f"{what}; another is starting"]


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (1, "ended with exit code 1 while starting: it printed nothing"),
        (-9, f"{KILLED} while starting"),
        (-6, "was killed by signal 6 (SIGABRT)"),
    ],
)
def test_the_end_of_one_that_starts(code: int, line: str) -> None:
    crew = Crew(2)
    crew.open(FIRST)
    crew.exit(0, code)
    assert crew.leaves == []
    assert crew.lines == [f"worker 0 (cpu:0) {line}; another is starting"]


def test_the_end_of_one_that_could_not_be_forked() -> None:
    crew = Crew(2)
    ended = Ending(1, "[Errno 11] Resource temporarily unavailable")
    crew.do(crew.members.exited(0, ended, doing("starting"), crew.now))
    said = "worker 0 (cpu:0) cannot be started: [Errno 11] Resource temporarily unavailable"
    assert crew.lines == [f"{said}; another is starting"]


def test_the_end_of_one_that_the_coordinator_has_killed() -> None:
    crew = Crew(2)
    crew.open(FIRST)
    crew.start_up(0, FIRST)
    crew.replace(0)
    crew.exit(0, -9)
    what = "worker 0 (cpu:0) no answer for 8 s in step 7, shard 3, forward for 8 s"
    # It is no kill from outside: what it computed may be why, and may end the next one too.
    assert crew.leaves == [Leave(0, FIRST, what, crashed=True)]


def test_one_that_is_back_says_so() -> None:
    crew = Crew(2)
    crew.open(FIRST)
    crew.start_up(0, FIRST)
    crew.done(0)
    crew.exit(0, -9)
    crew.pass_time(0.0)
    crew.now += 2.25
    crew.start_up(0, FIRST)
    assert crew.lines[-1] == "worker 0 is back after 2.2 s"


# --- who is started again -------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "starts"), [(-9, 21), (1, 3), (-11, 3)])
def test_starts_in_vain_are_bounded(code: int, starts: int) -> None:
    crew = Crew(2)
    while crew.members[0].state is not State.GIVEN_UP:
        crew.exit(0, code)
        crew.check()
        crew.pass_time(5.0)
        if 0 in crew.to_start:
            crew.start(0)
    assert crew.starts[0] == starts
    assert crew.lines[-1].endswith("; the run goes on without it")
    crew.pass_time(1e6)
    assert crew.starts[0] == starts


def test_a_crew_of_which_nobody_is_left_ends_the_run() -> None:
    crew = Crew(2)
    for n in (0, 1, 0, 1, 0, 1):
        if n in crew.to_start:
            crew.start(n)
        crew.exit(n, 1)
        crew.now += 1.0
        crew.do(d for d in crew.members[n].tick(crew.now, is_computing=False))
    assert isinstance(crew.error, WorkerError)
    end = "ended with exit code 1 while starting: it printed nothing"
    assert str(crew.error) == (
        "no worker is left, and no other is started:\n"
        f"  worker 0 (cpu:0) {end}\n  worker 1 (cpu:1) {end}"
    )


def test_one_that_cannot_be_started_is_tried_again_and_then_given_up() -> None:
    crew = Crew(2)
    crew.open(FIRST)
    crew.start_up(0, FIRST)
    crew.done(0)
    crew.exit(0, -9)
    for _ in range(2):
        crew.pass_time(1.0)
        crew.cannot_start(0)
    assert crew.lines[1:] == [
        "worker 0 cannot be started: no memory; another is starting",
        "worker 0 cannot be started: no memory; another is starting",
    ]
    crew.pass_time(1.0)
    crew.cannot_start(0)
    assert crew.members[0].state is State.GIVEN_UP


def test_no_other_takes_the_place_where_the_script_has_changed() -> None:
    crew = Crew(2)
    crew.exit(0, -9, changed="/a/script.py")
    assert crew.lines == [
        f"worker 0 (cpu:0) {KILLED} while starting; /a/script.py has changed since, so that no "
        "other can take its place; the run goes on without it"
    ]


def test_a_mistake_of_the_script_ends_the_run_only_before_it_has_worked() -> None:
    crew = Crew(2)
    crew.refuse(0)
    crew.exit(0, 1)
    assert isinstance(crew.error, UserError)
    assert str(crew.error) == "another dataset"
    crew = Crew(2)
    crew.done(1)
    crew.refuse(0)
    crew.exit(0, 1)
    assert crew.lines == ["worker 0 (cpu:0) another dataset; the run goes on without it"]


def test_what_the_script_raises_twice_ends_the_run_before_it_has_worked() -> None:
    errors = [ValueError("no such file") for _ in range(3)]
    crew = Crew(3)
    for number, text in ((0, "ValueError: a"), (1, "ValueError: b"), (2, "ValueError: a")):
        crew.members[number].raised(Raised(errors[number], text))
        crew.exit(number, 1)
    assert crew.lines == [
        "worker 0 (cpu:0) raised ValueError: a while starting; another is starting",
        "worker 1 (cpu:1) raised ValueError: b while starting; another is starting",
    ]
    assert crew.error is errors[2]


def test_what_the_script_raises_later_is_said_and_the_run_goes_on() -> None:
    crew = Crew(2)
    crew.done(1)
    for _ in range(3):
        crew.members[0].raised(Raised(ValueError("a"), "ValueError: a"))
        crew.exit(0, 1)
        crew.pass_time(5.0)
        if 0 in crew.to_start:
            crew.start(0)
    assert crew.lines[-1] == (
        "worker 0 (cpu:0) raised ValueError: a while starting; the run goes on without it"
    )


# --- who is waited for, and how long --------------------------------------------------------------


def test_the_first_ones_wait_for_the_others() -> None:
    crew = Crew(2, gather_s=GATHER_S)
    crew.open(FIRST)
    crew.start_up(0, FIRST)
    assert (crew.members[0].state, crew.members.is_gathering) == (State.READY, True)
    crew.start_up(1, FIRST)
    assert [m.state for m in crew.members] == [State.JOINED] * 2
    assert not crew.members.is_gathering


@pytest.mark.parametrize("how", ["late", "ended"])
def test_the_first_ones_do_not_wait_for_ever(how: str) -> None:
    crew = Crew(2, gather_s=GATHER_S)
    crew.open(FIRST)
    crew.start_up(0, FIRST)
    if how == "late":
        crew.pass_time(GATHER_S - 0.1)
        assert crew.members[0].state is State.READY
        assert min(crew.members.due()) == pytest.approx(crew.now + 0.1)
        crew.pass_time(0.1)
    else:
        crew.exit(1, -9)
    assert crew.members[0].state is State.JOINED
    # Who comes later joins at once.
    if how == "ended":
        crew.tick()
    crew.start_up(1, FIRST)
    assert crew.members[1].state is State.JOINED


# --- a crew that grows ----------------------------------------------------------------------------


def test_a_crew_that_grows_begins_with_the_least_and_takes_others_as_they_come() -> None:
    crew = Crew(3, gather_s=GATHER_S, least=2)
    crew.open(FIRST)
    crew.start_up(0, FIRST)
    crew.pass_time(10 * TIMEOUT_S)  # whoever waits for room does so without end
    crew.pass_time(GATHER_S)
    crew.pass_time(GATHER_S)
    assert [m.state for m in crew.members] == [State.READY, State.STARTING, State.STARTING]
    here = "1 is here of the 2 that it takes to begin"
    waits = f"waiting for workers: {here}; 2 start as soon as there is room"
    assert crew.lines == [waits]  # once
    crew.start_up(1, FIRST)
    assert [m.state for m in crew.members] == [State.JOINED, State.JOINED, State.STARTING]
    crew.start_up(2, FIRST)
    assert crew.members[2].state is State.JOINED
    assert crew.lines == [waits, "worker 2 has come: 3 take part"]


def test_those_that_have_room_are_waited_for_a_moment() -> None:
    crew = Crew(3, gather_s=GATHER_S, least=1)
    crew.open(FIRST)
    crew.place(1)
    crew.start_up(0, FIRST)
    assert crew.members[0].state is State.READY
    crew.pass_time(GATHER_S)
    assert crew.members[0].state is State.JOINED
    crew.pass_time(TIMEOUT_S)  # this one has room, and does not come
    assert [m.state for m in crew.members] == [State.JOINED, State.KILLED, State.STARTING]


def test_one_of_a_fixed_crew_waits_for_room_as_long_as_it_may_start() -> None:
    members = Members(["cpu"], TIMEOUT_S)
    members[0].started(0.0, tells_exit=True, is_placed=False)
    assert members[0].tick(TIMEOUT_S, is_computing=False) == [Kill(0)]
    assert members[0].attempt is not None
    took = "took more than worker_timeout_s=60 s to find a machine that has room for it"
    assert members[0].attempt.kill_reason == took
    # With room it has the time anew.
    members = Members(["cpu"], TIMEOUT_S)
    members[0].started(0.0, tells_exit=True, is_placed=False)
    members[0].placed(TIMEOUT_S - 1.0)
    assert members[0].tick(TIMEOUT_S, is_computing=False) == []


def test_a_crew_that_grows_waits_when_nobody_is_left() -> None:
    crew = Crew(2, gather_s=GATHER_S, least=2)
    crew.open(FIRST)
    for n in (0, 1):
        crew.start_up(n, FIRST)
        crew.done(n)
    crew.exit(0, -9)
    crew.tick()
    crew.pass_time(5 * GATHER_S)
    assert len(crew.lines) == 1  # with one left it goes on
    crew.start(0)
    crew.exit(1, -9)
    crew.tick()
    crew.start(1)
    crew.pass_time(GATHER_S)
    assert crew.lines[-1] == "waiting for workers: none is here; 2 start as soon as there is room"
    assert crew.error is None
    crew.start_up(1, FIRST)
    assert crew.members[1].state is State.JOINED


def test_one_that_is_to_leave_hands_over_and_another_is_started() -> None:
    crew = Crew(2)
    crew.open(FIRST)
    crew.open(SECOND)
    for n in (0, 1):
        crew.start_up(n, FIRST, SECOND)
    crew.done(1)
    crew.leave(1)
    left = "worker 1 (cpu:1) has left host-b, which Ray drains"
    assert crew.leaves == [Leave(1, job, left, crashed=False) for job in (FIRST, SECOND)]
    assert crew.members[1].state is State.LEAVING
    assert not crew.members.hand_over(1)
    crew.exit(1, -9)
    assert crew.lines == [f"{left}; another is starting"]
    assert len(crew.leaves) == 2
    crew.tick()
    crew.start_up(1, FIRST)
    assert crew.members[1].state is State.JOINED


def test_a_start_that_takes_too_long_is_killed() -> None:
    crew = Crew(2)
    crew.pass_time(TIMEOUT_S - 1.0)
    assert crew.members[0].state is State.STARTING
    crew.pass_time(1.0)
    assert crew.members[0].state is State.KILLED
    crew.exit(0, -9)
    took = "took more than worker_timeout_s=60 s to start"
    assert crew.lines == [f"worker 0 (cpu:0) {took}; another is starting"]


def test_the_time_to_join_begins_anew_with_each_message_and_not_for_one_that_computes() -> None:
    crew = Crew(1)
    crew.open(FIRST)
    crew.start_up(0, FIRST)
    crew.open(SECOND)
    crew.now += TIMEOUT_S - 1.0
    crew.done(0)
    crew.pass_time(TIMEOUT_S - 1.0)
    assert crew.members[0].state is State.JOINED
    crew.pass_time(2.0, computing=[0])
    assert crew.members[0].state is State.JOINED
    assert list(crew.members.due(frozenset([0]))) == []
    crew.tick()
    assert crew.members[0].state is State.KILLED


def test_one_that_never_answers_is_lost_however_short_the_jobs_are() -> None:
    crew = Crew(2)
    crew.open(FIRST)
    for n in (0, 1):
        crew.start_up(n, FIRST)
    for job in range(SECOND, 130):
        crew.open(job)
        crew.ready(0, job)
        crew.pass_time(0.5)
        crew.close(job)
        if job >= 100:  # it is told no more, as its wire is full
            crew.members[1].not_asked(job)
    assert crew.members[0].state is State.JOINED
    assert crew.members[1].state is State.KILLED
    assert list(crew.members[1].due(is_computing=False)) == []
    crew.exit(1, -9)
    took = "took more than worker_timeout_s=60 s to answer in step 7, shard 3, forward for 8 s"
    assert crew.lines == [f"worker 1 (cpu:1) {took}; another is starting"]


def test_an_answer_to_a_job_that_is_over_ends_the_wait_for_it() -> None:
    crew = Crew(1)
    crew.open(FIRST)
    crew.start_up(0, FIRST)
    crew.open(SECOND)
    crew.close(SECOND)
    crew.do(crew.members.ready(0, SECOND, crew.now))
    assert list(crew.members.due()) == []
    crew.pass_time(2 * TIMEOUT_S)
    assert crew.members[0].state is State.JOINED


def test_one_that_has_closed_its_wire_has_some_time_to_end() -> None:
    crew = Crew(2)
    crew.open(FIRST)
    crew.start_up(0, FIRST)
    crew.cut(0)
    crew.pass_time(SILENT_S - 0.1)
    assert crew.members[0].state is State.SILENT
    crew.pass_time(0.1)  # it is killed, and waited for
    what = "worker 0 (cpu:0) closed its wire in step 7, shard 3, forward for 8 s"
    assert crew.lines == [f"{what}; another is starting"]


def test_where_nobody_tells_of_an_exit_one_that_is_silent_is_looked_at_again_and_again() -> None:
    crew = Crew(2, tells_exit=False, stubborn=True)
    crew.start_up(0)
    crew.cut(0)
    for _ in range(3):
        assert min(crew.members[0].due(is_computing=False)) <= crew.now
        assert crew.members[0].tick(crew.now, is_computing=False) == [AwaitEnd(0)]
        assert crew.members[0].still_there(crew.now + 0.5) == []
        crew.now += 0.5
    crew.now += SILENT_S
    assert crew.members[0].still_there(crew.now) == [Kill(0), AwaitEnd(0)]
    assert crew.members[0].still_there(crew.now + 0.5) == []  # no second kill


def test_a_job_that_is_over_is_joined_by_nobody() -> None:
    crew = Crew(1)
    crew.open(FIRST)
    crew.here(0)
    crew.close(FIRST)
    crew.do(crew.members.ready(0, FIRST, crew.now))  # the answer was on its way
    assert crew.members[0].state is State.HERE
    crew.open(SECOND)
    crew.ready(0, SECOND)
    assert crew.processes[0].joined == {SECOND}


def test_decisions_are_pure() -> None:
    impure = {"torch", "time", "threading", "socket", "selectors", "subprocess", "os"}
    for module in (decisions, ending, member, members, restarts):
        assert module.__file__ is not None
        tree = ast.parse(Path(module.__file__).read_text())
        names = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
        names += [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        assert not {name.partition(".")[0] for name in names} & impure, module
