"""Bounded staleness: K updates at most between parameters and gradient; the fast wait.

Legend: V shards of a step, N workers. w0 is worker 0, and (2, 5) is shard 5 of step 2.
"""

from __future__ import annotations

import pytest
from support.scripted import (
    HOME,
    applied,
    by_shard,
    handle_all,
)
from support.simulator import Simulation

from quorate.coordination.coordinator import Coordinator
from quorate.coordination.protocol import (
    Applied,
    Apply,
    Compute,
    Done,
    Joined,
    Keep,
    Left,
)
from quorate.coordination.rules import Async, Bounded, Rule


def test_whoever_would_be_too_far_ahead_waits() -> None:
    c = by_shard(Bounded(2), joined=2)  # w1 computes step 1 for a long time
    effects = c.handle(Done(0, 0, 0), 1.0)
    assert effects == [Keep(0, 0, 0), Compute(0, 2, 0, HOME), Apply(0, (0,))]
    assert c.handle(Applied(0), 1.0) == []
    effects = c.handle(Done(0, 2, 0), 2.0)
    assert effects == [Keep(0, 2, 0), Compute(0, 3, 0, HOME), Apply(2, (0,))]
    assert applied(effects) == (2, (0,), 1)
    assert c.handle(Applied(2), 2.0) == []
    # One update more, and step 1 would be too stale. It may still be computed for later ones.
    assert c.handle(Done(0, 3, 0), 3.0) == [Keep(0, 3, 0), Compute(0, 4, 0, HOME)]
    # Three are open, and would the fourth be applied last, it would be too stale.
    assert c.handle(Done(0, 4, 0), 4.0) == [Keep(0, 4, 0)]

    effects = c.handle(Done(1, 1, 0), 99.0)
    assert effects == [Keep(1, 1, 0), Apply(1, (1,))]
    assert applied(effects) == (1, (0,), 2)
    effects = c.handle(Applied(1), 99.0)
    assert effects == [Compute(0, 5, 0, HOME), Apply(3, (0,))]
    assert applied(effects) == (3, (0,), 2)
    effects = c.handle(Applied(3), 99.0)
    assert effects == [Compute(1, 6, 0, HOME), Apply(4, (0,))]
    assert applied(effects) == (4, (0,), 2)
    assert c.handle(Applied(4), 99.0) == []


def late(c: Coordinator, updates: int) -> int:
    """How stale w1's first gradient is, if w0 would make so many updates meanwhile."""
    task = Compute(0, 0, 0, HOME)
    for now in range(updates):
        effects = c.handle(Done(0, task.step, 0), float(now))
        tasks = [effect for effect in effects if isinstance(effect, Compute)]
        while applies := [effect for effect in effects if isinstance(effect, Apply)]:
            effects = c.handle(Applied(applies[0].step), float(now))
            tasks += [effect for effect in effects if isinstance(effect, Compute)]
        if not tasks:
            break
        [task] = tasks
    step, _, staleness = applied(c.handle(Done(1, 1, 0), 99.0))
    assert step == 1
    return staleness


@pytest.mark.parametrize("most", [1, 2, 5])
def test_a_gradient_is_applied_up_to_k_updates_after_its_parameters_and_never_later(
    most: int,
) -> None:
    for updates in (1, most, most + 1, most + 7):
        assert late(by_shard(Bounded(most), joined=2), updates) == min(updates, most)
        assert late(by_shard(Async(), joined=2), updates) == updates


def test_with_a_bound_of_zero_one_works_at_a_time() -> None:
    c = by_shard(Bounded(0), joined=2)
    assert c.handle(Done(0, 0, 0), 1.0) == [Keep(0, 0, 0), Apply(0, (0,))]
    assert c.handle(Applied(0), 1.0) == [Compute(0, 1, 0, HOME)]


def test_under_a_bound_nothing_is_copied_and_a_dead_worker_holds_nobody_up() -> None:
    c = by_shard(Bounded(1), joined=2)
    handle_all(c, 1.0, Done(0, 0, 0), Applied(0))  # w0 goes on with 2
    assert c.handle(Done(0, 2, 0), 2.0) == [Keep(0, 2, 0)]  # and waits for 1
    assert c.handle(Left(1, "killed"), 50.0) == [Compute(0, 1, 0, HOME), Apply(2, (0,))]
    assert c.handle(Applied(2), 50.0) == []
    assert applied(c.handle(Done(0, 1, 0), 51.0)) == (1, (0,), 1)


@pytest.mark.parametrize("most", [1, 3, 6])
def test_the_bound_costs_no_time_while_nobody_is_slower_than_it_allows(most: int) -> None:
    def took_s(rule: Rule) -> float:
        run = Simulation(
            shards=1,
            steps=60,
            rule=rule,
            time_s=lambda worker, step, shard: 1.0 + 0.01 * worker,
        )
        run.at(0.0, *map(Joined, range(most + 1)))
        run.run()
        assert max(run.staleness) <= most * 2
        return run.now

    assert took_s(Bounded(most)) <= took_s(Async()) + 2.0


def test_a_worker_ten_times_slower_slows_the_others_under_a_bound_and_not_without() -> None:
    def run_with(rule: Rule) -> Simulation:
        run = Simulation(
            shards=1,
            steps=100,
            rule=rule,
            time_s=lambda worker, step, shard: 10.0 if worker == 2 else 1.0,
        )
        run.at(0.0, Joined(0), Joined(1), Joined(2))
        run.run()
        return run

    run = run_with(Async())
    assert run.now < 52.0
    assert max(run.staleness) >= 20
    run = run_with(Bounded(4))
    assert max(run.staleness) == 4
    assert run.now > 52.0
    run = run_with(Bounded(25))
    assert run.now < 60.0
