"""Crews that grow: who is waited for, who takes part later, who hands over."""

from __future__ import annotations

from support.crew import FIRST, SECOND, TIMEOUT_S, Crew

from quorate.transports.processes.decisions import (
    Kill,
    Leave,
)
from quorate.transports.processes.member import State
from quorate.transports.processes.members import GATHER_S, Members


def test_a_crew_that_grows_begins_with_the_least_and_takes_others_as_they_come() -> None:
    crew = Crew(3, gather_s=GATHER_S, least=2)
    crew.open(FIRST)
    crew.start_up(0, FIRST)
    crew.pass_time(10 * TIMEOUT_S)  # whoever waits for room does so without end
    crew.pass_time(GATHER_S)
    crew.pass_time(GATHER_S)
    assert [m.state for m in crew.members] == [State.READY, State.STARTING, State.STARTING]
    waits = "waiting for workers: 1 of at least 2 here; 2 start as soon as there is room"
    assert crew.lines == [waits]  # once
    crew.start_up(1, FIRST)
    assert [m.state for m in crew.members] == [State.JOINED, State.JOINED, State.STARTING]
    crew.start_up(2, FIRST)
    assert crew.members[2].state is State.JOINED
    assert crew.lines == [waits, "worker 2 has joined: 3 take part"]


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
    waits = "waiting for workers: 0 of at least 1 here; 2 start as soon as there is room"
    assert crew.lines[-1] == waits
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
    left = "worker 1 (cpu:1) has left host-b, because Ray drains the node"
    assert crew.leaves == [Leave(1, job, left, crashed=False) for job in (FIRST, SECOND)]
    assert crew.members[1].state is State.LEAVING
    assert not crew.members.hand_over(1)
    crew.exit(1, -9)
    assert crew.lines == [f"{left}; another is starting"]
    assert len(crew.leaves) == 2
    crew.tick()
    crew.start_up(1, FIRST)
    assert crew.members[1].state is State.JOINED
