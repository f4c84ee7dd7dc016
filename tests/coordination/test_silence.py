"""Silence: a worker without an answer for too long is replaced.

Legend: V shards of a step, N workers. w0 is worker 0, and (2, 5) is shard 5 of step 2.
"""

from __future__ import annotations

import pytest
from support.scripted import (
    HOME,
    coordinator,
    handle_all,
    straggling,
)

from quorate.coordination.coordinator import Phase
from quorate.coordination.protocol import (
    Applied,
    Apply,
    Compute,
    Done,
    Joined,
    Keep,
    Left,
    Replace,
    Tick,
    Wake,
)


def test_a_worker_without_an_answer_for_too_long_is_replaced_once() -> None:
    c = coordinator(shards=1, timeout_s=10.0)
    assert c.handle(Joined(0), 1.0) == [Compute(0, 0, 0, HOME), Wake(11.0)]
    assert c.handle(Tick(), 10.5) == [Wake(11.0)]
    assert c.handle(Tick(), 11.0) == [Replace(0, "no answer for 10 s")]
    assert c.handle(Tick(), 99.0) == []
    assert c.handle(Left(0, "no answer", crashed=True), 99.0) == []
    assert c.handle(Joined(0), 100.0) == [Compute(0, 0, 0, HOME), Wake(110.0)]


def test_a_worker_has_three_times_its_usual_time_to_answer() -> None:
    c = coordinator(shards=1, steps=2, joined=1, timeout_s=10.0)
    c.handle(Done(0, 0, 0), 8.0)
    assert c.handle(Applied(0), 8.0) == [Compute(0, 1, 0, HOME), Wake(32.0)]
    assert c.handle(Tick(), 18.0) == [Wake(32.0)]
    assert c.handle(Tick(), 32.0) == [Replace(0, "no answer for 24 s")]


def test_an_idle_worker_owes_no_answer() -> None:
    c = coordinator(shards=1, joined=2, timeout_s=10.0)
    assert c.handle(Tick(), 10.0) == [Replace(0, "no answer for 10 s")]
    assert c.handle(Tick(), 99.0) == []


def test_nobody_is_replaced_before_the_results_under_way_are_in() -> None:
    c = coordinator(shards=2, joined=2, timeout_s=10.0)
    # Both are overdue after a long pause, and w0's result comes before the tick.
    [keep, wake] = c.handle(Done(0, 0, 0), 30.0)
    assert keep == Keep(0, 0, 0)
    assert wake == Wake(30.0)  # or w1 would be forgotten
    assert c.handle(Tick(), 30.0) == [Replace(1, "no answer for 30 s"), Wake(45.0)]


def test_a_worker_that_was_silent_when_another_joined_is_not_forgotten() -> None:
    c = coordinator(shards=1, joined=1, timeout_s=10.0)
    assert c.handle(Joined(1), 10.0) == [Wake(10.0)]
    assert c.handle(Tick(), 10.0) == [Replace(0, "no answer for 10 s")]


def test_a_worker_is_replaced_during_an_update_too() -> None:
    c = straggling(timeout_s=5.0)  # w1 is silent for too long at 15
    handle_all(c, 11.5, Done(0, 1, 0))  # and w0 takes the copy
    assert c.handle(Done(0, 1, 1), 12.5) == [Keep(0, 1, 1), Apply(1, (0,)), Wake(15.0)]
    assert c.handle(Tick(), 15.0) == [Replace(1, "no answer for 5 s")]
    assert c.phase is Phase.APPLYING
    assert c.handle(Left(1, "no answer", crashed=True), 15.5) == []
    assert c.handle(Applied(1), 16.0) == [
        Compute(0, 2, 0, HOME),
        Compute(2, 2, 1, HOME),
        Wake(21.0),
    ]


@pytest.mark.parametrize(("timeout_s", "wake_at"), [(1.25, 1.25), (100.0, 1.5)])
def test_the_earliest_time_of_both_kinds_is_asked_for(timeout_s: float, wake_at: float) -> None:
    c = coordinator(shards=2, joined=2, timeout_s=timeout_s)
    assert c.handle(Done(0, 0, 0), 1.0) == [Keep(0, 0, 0), Wake(wake_at)]
