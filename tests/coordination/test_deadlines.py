"""Which step may be applied next, and what it costs to know, where many steps are open."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import inf
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.histories import fixed

from quorate.coordination.deadlines import Deadlines
from quorate.coordination.rules import parse
from quorate.simulation.virtual_run import VirtualRun

MOVES = st.lists(st.tuples(st.integers(0, 25), st.integers(-3, 3)), max_size=150)


def least(versions: dict[int, int], without: int) -> float:
    """Least v - i, by looking at all."""
    ordered = sorted(version for number, version in versions.items() if number != without)
    return min((version - i for i, version in enumerate(ordered)), default=inf)


@given(MOVES, st.booleans())
@fixed(200)
def test_the_least_slack_is_what_looking_at_all_would_find(
    moves: list[tuple[int, int]], in_order: bool
) -> None:
    ours, versions, newest = Deadlines(), dict[int, int](), 5
    for number, by in moves:
        newest += max(0, by)
        if by < 0 and number in versions:
            ours.drop(number)
            del versions[number]
        else:
            versions[number] = newest if in_order else newest + by
            ours.put(number, versions[number])
        for each in range(27):
            assert ours.least_without(each) == least(versions, each)


def lines_of(play: Callable[[], object]) -> int:
    """How many lines of the coordinator's folder run: a count, on any machine the same."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if "coordination" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        play()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("rule", ["bounded:{most}", "async"])
def test_an_event_costs_no_more_with_many_steps_open(rule: str) -> None:
    def per_event(workers: int) -> float:
        run = VirtualRun(
            places=["host"] * workers,
            shards=workers,
            batches=3,
            rule=parse(rule.format(most=4 * workers)),
            # One worker is late with everything: steps that are done wait for its own.
            shard_s=lambda worker, step, _: 40.0 if worker == 0 else 1.0 + step % 7 / 100,
        )
        return lines_of(run.play) / run.events

    few, many = per_event(20), per_event(160)  # log2: 4.3 and 7.3
    assert many < 1.8 * few
