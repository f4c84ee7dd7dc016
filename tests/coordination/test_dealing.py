"""Dealing: who computes which shard, and who is at home where.

Legend: V shards of a step, N workers. w0 is worker 0, and (2, 5) is shard 5 of step 2.
"""

from __future__ import annotations

import pytest
from support.scripted import (
    ENDED,
    FREE,
    HOME,
    coordinator,
    handle_all,
)

from quorate.coordination.coordinator import Phase
from quorate.coordination.plan import home_shards
from quorate.coordination.protocol import (
    Applied,
    Apply,
    Compute,
    Done,
    Finish,
    Joined,
    Keep,
    Left,
    Wake,
)


def test_with_as_many_workers_as_shards_each_computes_one() -> None:
    c = coordinator(shards=3, steps=2)
    assert c.handle(Joined(0), 0.0) == [Compute(0, 0, 0, HOME)]
    # The homes move with each who joins: {0, 1} and {2}, and only then {0}, {1} and {2}.
    assert c.handle(Joined(1), 0.0) == [Compute(1, 0, 2, HOME)]
    assert c.handle(Joined(2), 0.0) == [Compute(2, 0, 1, FREE)]
    assert c.workers == (0, 1, 2)

    assert c.handle(Done(1, 0, 2), 1.0) == [Keep(1, 0, 2), Wake(1.5)]
    assert c.handle(Done(0, 0, 0), 1.1) == [Keep(0, 0, 0), Wake(pytest.approx(1.575))]
    assert c.handle(Done(2, 0, 1), 1.2) == [Keep(2, 0, 1), Apply(0, (0, 1, 2))]
    assert c.phase is Phase.APPLYING

    assert c.handle(Applied(0), 2.0) == [
        Compute(0, 1, 0, HOME),
        Compute(1, 1, 1, HOME),
        Compute(2, 1, 2, HOME),
    ]
    handle_all(c, 3.0, Done(0, 1, 0), Done(1, 1, 1), Done(2, 1, 2))
    assert c.handle(Applied(1), 4.0) == [Finish(2, ENDED)]
    assert c.phase is Phase.FINISHED


def test_one_worker_computes_all_shards_in_order() -> None:
    c = coordinator(shards=3)
    assert c.handle(Joined(7), 0.0) == [Compute(7, 0, 0, HOME)]
    assert c.handle(Done(7, 0, 0), 1.0) == [Keep(7, 0, 0), Compute(7, 0, 1, HOME)]
    assert c.handle(Done(7, 0, 1), 2.0) == [Keep(7, 0, 1), Compute(7, 0, 2, HOME)]
    assert c.handle(Done(7, 0, 2), 3.0) == [Keep(7, 0, 2), Apply(0, (7,))]


def test_with_more_shards_than_workers_the_fast_one_does_more() -> None:
    c = coordinator(shards=6, joined=2)  # w0 is at home in 0 to 2, w1 in 3 to 5
    assert c.handle(Done(0, 0, 0), 1.0) == [Keep(0, 0, 0), Compute(0, 0, 1, HOME)]
    assert c.handle(Done(0, 0, 1), 2.0) == [Keep(0, 0, 1), Compute(0, 0, 2, HOME)]
    # From the end of the other's run, so that what the other keeps stays contiguous.
    assert c.handle(Done(0, 0, 2), 3.0) == [Keep(0, 0, 2), Compute(0, 0, 5, FREE)]
    assert c.handle(Done(0, 0, 5), 4.0) == [Keep(0, 0, 5), Compute(0, 0, 4, FREE)]
    assert c.handle(Done(1, 0, 3), 4.5) == [Keep(1, 0, 3), Wake(5.5)]
    assert c.handle(Done(0, 0, 4), 5.0) == [Keep(0, 0, 4), Apply(0, (0, 1))]


def test_a_join_in_the_middle_of_a_step_gets_a_shard() -> None:
    c = coordinator(shards=4, joined=1)
    c.handle(Done(0, 0, 0), 1.0)  # w0 goes on with shard 1
    assert c.handle(Joined(1), 1.5) == [Compute(1, 0, 2, HOME)]


def test_a_join_during_an_update_waits_for_the_next_step() -> None:
    c = coordinator(shards=1, steps=2, joined=1)
    c.handle(Done(0, 0, 0), 1.0)
    assert c.handle(Joined(1), 1.0) == []
    assert c.handle(Applied(0), 2.0) == [Compute(0, 1, 0, HOME), Wake(3.5)]


def test_with_more_workers_than_shards_the_first_have_a_home_each() -> None:
    assert [list(home_shards((rank, 5), 3)) for rank in range(5)] == [[0], [1], [2], [], []]
    assert [list(home_shards((rank, 3), 8)) for rank in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    c = coordinator(shards=2, steps=2, joined=3)
    handle_all(c, 1.0, Done(0, 0, 0), Done(1, 0, 1))
    assert c.handle(Applied(0), 2.0)[:2] == [Compute(0, 1, 0, HOME), Compute(1, 1, 1, HOME)]


def test_a_worker_is_told_its_place_among_those_who_are_there() -> None:
    c = coordinator(shards=4, joined=2)  # w0 computes shard 0, w1 shard 2
    [_, first] = c.handle(Done(0, 0, 0), 1.0)
    assert isinstance(first, Compute)
    assert first.rank_of == (0, 2)
    c.handle(Left(0, "killed"), 1.5)
    [_, second] = c.handle(Done(1, 0, 2), 2.0)
    assert isinstance(second, Compute)
    assert second.rank_of == (0, 1)


def test_a_run_of_no_steps_is_over_when_the_first_worker_joins() -> None:
    assert coordinator(shards=2, steps=0).handle(Joined(0), 0.0) == [Finish(0, ENDED)]
