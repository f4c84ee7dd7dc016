"""How the end of a worker is worded, and that it is back."""

from __future__ import annotations

import pytest
from support.crew import FIRST, KILLED, Crew, doing

from quorate.transports.processes.decisions import (
    Leave,
)
from quorate.transports.processes.ending import Ending


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
