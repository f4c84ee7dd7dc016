"""What becomes of workers, in every order of events: no process, wire or clock is in it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from support.crew import FIRST, KILLED, SECOND, TIMEOUT_S, Crew

from quorate.errors import UserError, WorkerError
from quorate.transports.as_worker.raised import Raised
from quorate.transports.processes import decisions, ending, member, members, restarts
from quorate.transports.processes.decisions import (
    AwaitEnd,
    Kill,
)
from quorate.transports.processes.member import SILENT_S, State
from quorate.transports.processes.members import GATHER_S

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
    assert crew.lines[-1].endswith("; the run continues without this worker")
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
        f"worker 0 (cpu:0) {KILLED} while starting; /a/script.py was edited during the run, so "
        "no other worker can start; the run continues without this worker"
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
    assert crew.lines == ["worker 0 (cpu:0) another dataset; the run continues without this worker"]


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
        "worker 0 (cpu:0) raised ValueError: a while starting; the run continues without this "
        "worker"
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
