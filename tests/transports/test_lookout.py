"""Members are looked at when something is due, and not with every shard that is done."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quorate.transports.processes.decisions import AwaitEnd, Decision
from quorate.transports.processes.lookout import LOOK_S, Lookout
from quorate.transports.processes.members import Members

TIMEOUT_S = 300.0


class Channel:
    """Of a job that some workers compute for."""

    def __init__(self, *workers: int) -> None:
        self.workers = workers

    def computing(self) -> list[int]:
        return list(self.workers)


class Counted(Members):
    """Members that count how often somebody asks what is due."""

    asked = 0

    def due(self, computing: frozenset[int] = frozenset()) -> Iterator[float]:
        self.asked += 1
        return super().due(computing)


@pytest.fixture
def members() -> Counted:
    """Two that have joined job 1."""
    members = Counted(["cpu"] * 2, TIMEOUT_S)
    members.open(1, 0.0)
    for member in members:
        member.started(0.0, tells_exit=False)
        members.here(member.number, 0.0)
        members.ready(member.number, 1, 0.0)
    return members


def lookout(members: Members, *channels: Channel) -> Lookout:
    """Return one that has no arena: nobody is asked what an interrupted job's workers are at."""
    by_number: dict[int, Any] = dict(enumerate(channels, 1))
    arena: Any = None
    return Lookout(members, by_number, arena)


def looked(lookout: Lookout) -> list[Decision]:
    return list(lookout.decisions())


def test_a_calm_crew_is_not_looked_at(members: Counted) -> None:
    look = lookout(members, Channel(0, 1))
    assert looked(look) == []
    before = members.asked
    for _ in range(3):
        assert look.sleeps_s(None) is None
        assert look.sleeps_s(5.0) == 5.0
        assert looked(look) == []
    assert members.asked == before


def test_after_news_it_is(members: Counted) -> None:
    look = lookout(members, Channel(0))
    assert looked(look) == []
    members[1].wire_cut(0.0)  # and nobody tells of its exit
    look.stir()
    assert look.sleeps_s(None) == 0.0
    assert looked(look) == [AwaitEnd(1)]
    assert look.sleeps_s(None) == 0.0  # until it has ended


def test_who_owes_an_answer_is_waited_for(members: Counted) -> None:
    look = lookout(members, Channel())
    members.open(2, 1e9)  # long after the machine was started
    assert looked(look) == []
    sleeps_s = look.sleeps_s(None)
    assert sleeps_s is not None
    assert sleeps_s > TIMEOUT_S
    members.close(2)


def test_while_a_job_is_interrupted_its_workers_are_looked_at(members: Counted) -> None:
    look = lookout(members, Channel(), Channel(0))
    for _ in range(2):
        assert looked(look) == []
        assert look.sleeps_s(None) == LOOK_S
        assert look.sleeps_s(0.25) == 0.25
