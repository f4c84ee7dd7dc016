"""Asynchronous updates: every gradient as it comes; how stale each is, and who goes on when.

Legend: V shards of a step, N workers. w0 is worker 0, and (2, 5) is shard 5 of step 2.
"""

from __future__ import annotations

import pytest
from support.scripted import (
    ENDED,
    FREE,
    HOME,
    applied,
    by_shard,
    handle_all,
)
from support.simulator import Simulation

from quorate.coordination.coordinator import Coordinator, Phase
from quorate.coordination.plan import PlanByShard
from quorate.coordination.protocol import (
    Applied,
    Apply,
    Cancel,
    Compute,
    Discard,
    Done,
    Finish,
    Joined,
    Keep,
    Left,
    Wake,
)
from quorate.coordination.rules import Async, Bounded, Rule


def test_who_pushes_goes_on_before_its_update_is_made() -> None:
    c = by_shard(Async(), joined=2)
    effects = c.handle(Done(0, 0, 0), 1.0)
    assert effects == [Keep(0, 0, 0), Compute(0, 2, 0, HOME), Apply(0, (0,))]
    assert applied(effects) == (0, (0,), 0)
    assert c.handle(Applied(0), 1.0) == []
    effects = c.handle(Done(1, 1, 0), 1.5)
    assert effects == [Keep(1, 1, 0), Compute(1, 3, 0, HOME), Apply(1, (1,))]
    assert applied(effects) == (1, (0,), 1)
    c.handle(Applied(1), 1.5)
    # (2, 0) is from before the first update, and two have been made since.
    assert applied(c.handle(Done(0, 2, 0), 2.0)) == (2, (0,), 2)
    c.handle(Applied(2), 2.0)
    assert c.tally.to_json() == {
        "fresh": [1, 0],
        "stale": [1, 1],
        "dropped": [0, 0],
        "copies": [0, 0],
        "staleness": [3, 2],
    }


def test_a_worker_that_is_alone_waits_for_its_update_and_is_never_stale() -> None:
    c = by_shard(Async(), joined=1)
    for step in range(5):
        effects = c.handle(Done(0, step, 0), 1.0)
        assert effects == [Keep(0, step, 0), Apply(step, (0,))]
        assert applied(effects) == (step, (0,), 0)
        assert c.handle(Applied(step), 1.0) == [Compute(0, step + 1, 0, HOME)]
    assert c.tally.to_json()["staleness"] == [0, 0]


@pytest.mark.parametrize("rule", [Async(), Bounded(0), Bounded(3)], ids=lambda rule: rule.name)
def test_one_worker_alone_is_plain_sgd(rule: Rule) -> None:
    run = Simulation(shards=1, steps=20, rule=rule)
    run.at(0.0, Joined(0))
    run.run()
    assert run.order == list(range(20))
    assert run.staleness == [0] * 20


def test_a_worker_that_is_left_alone_is_not_stale_any_more() -> None:
    run = Simulation(shards=1, steps=20, rule=Async())
    run.at(0.0, Joined(0), Joined(1))
    run.at(5.5, Left(1, "killed"))
    run.run()
    assert run.finish == Finish(20, ENDED)
    # What w1 had begun is done last of all that was open, and then one at a time.
    assert set(run.staleness[:10]) == {0, 1, 2}
    assert set(run.staleness[12:]) == {0}


def test_a_worker_that_joins_is_never_waited_for() -> None:
    c = by_shard(Async(), joined=1)
    assert c.handle(Joined(1), 0.5) == [Compute(1, 1, 0, HOME)]
    assert c.handle(Done(0, 0, 0), 1.0)[:2] == [Keep(0, 0, 0), Compute(0, 2, 0, HOME)]


def test_what_a_dead_worker_computed_is_next_and_is_computed_afresh() -> None:
    c = by_shard(Async(), joined=3)
    handle_all(c, 1.0, Done(0, 0, 0), Applied(0))  # and w0 goes on with step 3
    assert c.handle(Left(1, "killed"), 1.5) == []
    effects = c.handle(Done(2, 2, 0), 2.0)
    assert effects == [Keep(2, 2, 0), Compute(2, 1, 0, HOME), Apply(2, (2,))]
    c.handle(Applied(2), 2.0)
    assert c.left_open == [1]
    assert applied(c.handle(Done(2, 1, 0), 3.0)) == (1, (0,), 1)


def test_a_gradient_that_is_lost_with_its_holder_is_computed_afresh() -> None:
    c = by_shard(Async(), joined=2)
    c.handle(Done(0, 0, 0), 1.0)  # its update is under way
    assert c.handle(Left(0, "killed"), 1.0) == []
    assert c.phase is Phase.COMPUTING
    assert c.handle(Done(1, 1, 0), 2.0) == [Keep(1, 1, 0), Compute(1, 0, 0, HOME), Apply(1, (1,))]
    assert c.handle(Applied(1), 2.0) == []
    assert c.left_open == [0]


def test_at_the_end_nobody_begins_more_than_is_asked_for() -> None:
    c = by_shard(Async(), steps=4, joined=3)
    assert c.handle(Done(0, 0, 0), 1.0)[1] == Compute(0, 3, 0, HOME)
    c.handle(Applied(0), 1.0)
    assert c.handle(Done(1, 1, 0), 1.0)[:2] == [Keep(1, 1, 0), Apply(1, (1,))]
    assert c.handle(Applied(1), 1.0) == [Wake(1.5)]  # when w2 is far behind
    # An idle worker may still help: the last ones are copied, and the first copy is in the update.
    effects = c.handle(Done(0, 3, 0), 1.5)
    assert effects[:2] == [
        Keep(0, 3, 0),
        Compute(0, 2, 0, "worker 2 is slow: far behind its usual time"),
    ]
    c.handle(Applied(3), 1.5)
    effects = c.handle(Done(0, 2, 0), 2.5)
    assert applied(effects) == (2, (0,), 1)  # as old as the copy, not as what it is a copy of
    assert c.handle(Applied(2), 2.5) == [Cancel(2, 2, 0), Finish(4, ENDED)]
    assert c.tally.of(2).copies == 1
    assert c.handle(Done(2, 2, 0), 9.0) == [Discard(2, 2, 0)]
    assert c.left_open == []


def test_no_more_steps_are_open_than_there_is_memory_for() -> None:
    c = Coordinator(shards_of=lambda step: 1, first_step=0, last_step=99, rule=Async(), most_open=2)
    assert c.handle(Joined(0), 0.0) == [Compute(0, 0, 0, HOME)]
    assert c.handle(Joined(1), 0.0) == [Compute(1, 1, 0, FREE)]
    assert c.handle(Joined(2), 0.0) == []
    # Both are open until the update is made.
    assert c.handle(Done(0, 0, 0), 1.0)[:2] == [Keep(0, 0, 0), Apply(0, (0,))]
    assert c.handle(Applied(0), 1.0)[:1] == [Compute(0, 2, 0, HOME)]


def test_each_begins_what_is_at_home_there_first_and_nothing_is_far_ahead() -> None:
    plan = PlanByShard(rows=80, batch_size=8, shards=4)
    c = Coordinator(
        shards_of=plan.shards_of,
        home_shards=plan.home_shards,
        lookahead=plan.lookahead,
        first_step=0,
        last_step=40,
        rule=Async(),
    )
    handle_all(c, 0.0, Joined(0), Joined(1))  # homes {0, 1} and {2, 3} of every four
    begun = [0]  # by w0, while w1 is stuck in step 2
    while len(begun) < 9:
        compute = next(
            effect
            for effect in c.handle(Done(0, begun[-1], 0), 1.0 + len(begun))
            if isinstance(effect, Compute)
        )
        assert c.handle(Applied(begun[-1]), 1.0 + len(begun)) == []
        begun.append(compute.step)
    # 12 is not within 8 steps of 3 until that is begun, which nobody else did.
    assert begun == [0, 1, 4, 5, 8, 9, 3, 12, 13]
