"""Every order of what may happen to members: short ones all, long ones drawn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.crew import FIRST, SECOND, TIMEOUT_S, Crew

from quorate.transports.processes.member import SILENT_S
from quorate.transports.processes.members import GATHER_S

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
