"""Update rules: which gradients make an update, how old they may be, and who waits for whom.

The coordinator's answers to scripted events under each rule, and what holds in any order of events;
what ``simulator`` checks is listed there. Then the rules' names, the tally, and the plan of rules
that apply shards one by one.

Legend: V shards of a step, N workers, R shards needed, K updates between parameters and gradient.
w0 is worker 0, and (2, 5) is shard 5 of step 2.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulator import Simulation, whole_sum

from quorate.coordination import rules
from quorate.coordination.coordinator import Coordinator, Phase
from quorate.coordination.plan import Plan, PlanByShard, from_json, home_shards
from quorate.coordination.protocol import (
    Abort,
    Applied,
    Apply,
    Cancel,
    Cancelled,
    Compute,
    Discard,
    Done,
    Effect,
    Event,
    Failed,
    Finish,
    Joined,
    Keep,
    Left,
    Stop,
    Tick,
    Wake,
)
from quorate.coordination.rules import Async, Bounded, Quorum, Rule, Sync
from quorate.coordination.tally import Tally
from quorate.errors import SettingError

HOME = "home shard"
FREE = "nobody has begun it"
FAR_BEHIND = "worker 2 is slow: far behind its usual time"
ENDED = "all steps are done"

# The same examples in every run, so that a failure is the change's and not the day's.
fixed = settings(max_examples=100, derandomize=True, deadline=None, database=None)


def handle_all(coordinator: Coordinator, now: float, *events: Event) -> list[Effect]:
    """All effects of some events at one time."""
    return [effect for event in events for effect in coordinator.handle(event, now)]


def applied(effects: Iterable[Effect]) -> tuple[int, tuple[int, ...], int]:
    """Of the one ``Apply`` among the effects: the step, the shards in it, the staleness."""
    [found] = [effect for effect in effects if isinstance(effect, Apply)]
    return found.step, found.shards, found.staleness


# --- quorum ---------------------------------------------------------------------------------------


def quorum(least: int, shards: int, steps: int = 9, *, joined: int) -> Coordinator:
    """``quorum:R``: each worker took 1 s for its shard of step 0, and all began step 1 at 10."""
    made = Coordinator(
        shards_of=lambda step: joined if step == 0 else shards,
        first_step=0,
        last_step=steps,
        rule=Quorum(least),
    )
    effects = handle_all(made, 0.0, *map(Joined, range(joined)))
    tasks = [effect for effect in effects if isinstance(effect, Compute)]
    handle_all(made, 1.0, *[Done(task.worker, task.step, task.shard) for task in tasks])
    made.handle(Applied(0), 10.0)
    made.tally = Tally()
    return made


def test_the_first_of_a_quorum_are_applied_and_the_late_one_is_told_to_leave_off() -> None:
    c = quorum(2, shards=3, joined=3)
    assert c.handle(Done(2, 1, 2), 11.0)[:1] == [Keep(2, 1, 2)]
    effects = c.handle(Done(0, 1, 0), 11.1)
    assert effects == [Keep(0, 1, 0), Apply(1, (0, 2))]
    assert applied(effects) == (1, (0, 2), 0)
    assert c.handle(Applied(1), 12.0)[:3] == [
        Cancel(1, 1, 1),
        Compute(0, 2, 0, HOME),
        Compute(2, 2, 2, HOME),
    ]
    assert c.tally.of(1).dropped == 1
    assert [c.tally.of(worker).fresh for worker in range(3)] == [1, 0, 1]


def test_a_late_result_is_discarded_and_counted_once() -> None:
    c = quorum(2, shards=3, joined=3)
    handle_all(c, 11.0, Done(0, 1, 0), Done(1, 1, 1), Applied(1))
    assert c.tally.of(2).dropped == 1  # known before it is back
    assert c.handle(Done(2, 1, 2), 11.5)[:1] == [Discard(2, 1, 2)]
    assert c.tally.of(2).dropped == 1


def test_of_three_results_where_two_were_needed_the_third_is_dropped() -> None:
    c = quorum(2, shards=3, joined=3)
    effects = handle_all(c, 11.0, Done(0, 1, 0), Done(1, 1, 1), Done(2, 1, 2))
    assert [effect for effect in effects if not isinstance(effect, Wake)] == [
        Keep(0, 1, 0),
        Keep(1, 1, 1),
        Apply(1, (0, 1)),
        Discard(2, 1, 2),  # the update is under way
    ]
    assert c.tally.of(2).dropped == 1
    # It is in phase with the others, and nobody has to be told.
    assert c.handle(Applied(1), 11.0) == [Compute(worker, 2, worker, HOME) for worker in range(3)]


def test_who_leaves_off_too_late_for_a_step_waits_to_be_in_phase_for_the_next() -> None:
    c = quorum(1, shards=3, joined=3)
    assert handle_all(c, 11.0, Done(1, 1, 1), Applied(1))[:5] == [
        Keep(1, 1, 1),
        Apply(1, (1,)),
        Cancel(0, 1, 0),
        Cancel(2, 1, 2),
        Compute(1, 2, 1, HOME),
    ]
    # w1 is expected at 12.
    assert c.handle(Cancelled(0, 1, 0), 11.9) == [Wake(12.5)]
    assert c.handle(Cancelled(2, 1, 2), 11.9) == [Wake(12.5)]
    assert handle_all(c, 12.0, Done(1, 2, 1), Applied(2))[1:] == [
        Apply(2, (1,)),
        *[Compute(worker, 3, worker, HOME) for worker in range(3)],
    ]


def test_in_the_middle_of_a_step_nobody_begins_what_the_quorum_will_not_need() -> None:
    c = quorum(3, shards=4, joined=3)  # w0 computes (1, 0), w1 (1, 2), w2 (1, 3), nobody (1, 1)
    # The other two are expected at 11, and w0 would be back at 11.9.
    assert c.handle(Done(0, 1, 0), 10.9) == [Keep(0, 1, 0), Wake(11.5)]
    assert c.handle(Done(1, 1, 2), 11.0) == [Keep(1, 1, 2), Wake(11.5)]
    assert applied(c.handle(Done(2, 1, 3), 11.1)) == (1, (0, 2, 3), 0)
    assert sum(c.tally.of(worker).dropped for worker in range(3)) == 0  # nobody has begun (1, 1)


def test_when_one_of_a_quorum_is_far_behind_another_shard_takes_its_place() -> None:
    c = quorum(3, shards=4, joined=3)
    handle_all(c, 11.0, Done(0, 1, 0), Done(1, 1, 2))
    # Rather one that nobody has begun than a copy of what w2 is slow with: either may be first.
    assert c.handle(Left(1, "killed", results_stay=True), 11.5) == [Compute(0, 1, 1, HOME)]
    assert applied(c.handle(Done(0, 1, 1), 12.5)) == (1, (0, 1, 2), 0)


def test_a_copy_of_a_shard_that_is_far_behind_is_counted_on() -> None:
    c = quorum(3, shards=4, joined=4)
    handle_all(c, 11.0, Done(0, 1, 0), Done(1, 1, 1))
    assert c.handle(Tick(), 11.5) == [
        Compute(0, 1, 2, "worker 2 is slow: far behind its usual time")
    ]
    # Nobody has shard 3 any more. The copy is expected at 12.5, and w1 would be later.
    assert c.handle(Left(3, "killed"), 11.75) == []
    assert applied(c.handle(Done(0, 1, 2), 12.5)) == (1, (0, 1, 2), 0)


def test_what_a_dead_worker_computed_is_dealt_again_only_if_the_quorum_needs_it() -> None:
    c = quorum(3, shards=4, joined=4)
    assert c.handle(Left(3, "killed"), 10.5) == []  # three compute, and three are needed
    assert c.handle(Left(2, "killed"), 10.6) == []  # two, but nobody is idle
    # The homes of two workers are {0, 1} and {2, 3}.
    assert c.handle(Done(0, 1, 0), 11.0) == [Keep(0, 1, 0), Compute(0, 1, 3, FREE)]
    # One is lost still, and w0 is expected before w1 would be done with it.
    assert c.handle(Done(1, 1, 1), 11.1) == [Keep(1, 1, 1), Wake(12.5)]
    assert applied(c.handle(Done(0, 1, 3), 12.0)) == (1, (0, 1, 3), 0)


def test_what_a_dead_worker_held_is_not_in_the_quorum() -> None:
    c = quorum(2, shards=3, joined=3)
    c.handle(Done(0, 1, 0), 11.0)
    assert c.handle(Left(0, "killed"), 11.1) == []  # two others compute
    assert c.handle(Done(1, 1, 1), 11.2)[:1] == [Keep(1, 1, 1)]
    assert applied(c.handle(Done(2, 1, 2), 11.3)) == (1, (1, 2), 0)


def test_a_holder_killed_during_the_update_of_a_quorum_is_replaced_by_one_that_was_late() -> None:
    c = quorum(2, shards=3, joined=3)
    handle_all(c, 11.0, Done(0, 1, 0), Done(1, 1, 1))
    assert c.phase is Phase.APPLYING
    c.handle(Left(0, "killed"), 11.1)
    assert c.phase is Phase.COMPUTING
    assert applied(c.handle(Done(2, 1, 2), 11.2)) == (1, (1, 2), 0)


def test_a_quorum_of_all_is_sync() -> None:
    def effects_of(rule: Rule) -> list[tuple[float, list[Effect]]]:
        chance = random.Random(0)
        run = Simulation(
            shards=5,
            steps=30,
            rule=rule,
            time_s=lambda worker, step, shard: chance.choice([0.5, 1.0, 1.0, 1.25, 10.0]),
            leaves_off_s=0.25,
        )
        run.at(0.0, Joined(0), Joined(1), Joined(2))
        run.at(20.0, Left(1, "killed"))
        run.at(25.0, Joined(1))
        seen = []
        while run.finish is None:
            effects = list(run.advance())
            seen.append((run.now, effects))
        assert run.copies > 0
        return seen

    assert effects_of(Quorum(5)) == effects_of(Sync())
    assert effects_of(Quorum(99)) == effects_of(Sync())  # or the last batch would never be in


def one_is_slow(rule: Rule, shards: int, slow_s: float) -> Simulation:
    """20 steps, w0 and w1 take 1 s, and w2 is slow."""
    run = Simulation(
        shards=shards,
        steps=20,
        rule=rule,
        time_s=lambda worker, step, shard: slow_s if worker == 2 else 1.0,
        leaves_off_s=0.0,
    )
    run.at(0.0, Joined(0), Joined(1), Joined(2))
    run.run()
    return run


def test_with_more_shards_than_workers_the_fast_do_more() -> None:
    run = one_is_slow(Sync(), shards=5, slow_s=2.0)
    assert run.now == 20 * 2
    assert run.computed == {0: 40, 1: 40, 2: 20}
    run = one_is_slow(Quorum(4), shards=5, slow_s=3.0)
    assert run.now == 20 * 2
    assert run.computed == {0: 40, 1: 40}
    assert run.fates["dropped"] == {2: 20}


def test_a_quorum_does_not_wait_for_a_backup_worker() -> None:
    run = one_is_slow(Quorum(2), shards=3, slow_s=7.0)
    assert run.now == 20
    assert run.fates["dropped"] == {2: 20}
    assert run.copies == 0
    assert run.sums[1:] == [whole_sum(step, 3, {0, 1}) for step in range(1, 20)]


# --- async ----------------------------------------------------------------------------------------


def apart(
    rule: Rule,
    steps: int = 99,
    *,
    joined: int,
    first_step: int = 0,
    left_open: Iterable[int] = (),
) -> Coordinator:
    """A rule that applies shards one by one; each is at home everywhere."""
    made = Coordinator(
        shards_of=lambda step: 1,
        home_shards=lambda rank_of, step: range(1),
        first_step=first_step,
        last_step=steps,
        left_open=left_open,
        rule=rule,
    )
    for worker in range(joined):
        made.handle(Joined(worker), 0.0)
    return made


def test_who_pushes_goes_on_before_its_update_is_made() -> None:
    c = apart(Async(), joined=2)
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
    c = apart(Async(), joined=1)
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
    c = apart(Async(), joined=1)
    assert c.handle(Joined(1), 0.5) == [Compute(1, 1, 0, HOME)]
    assert c.handle(Done(0, 0, 0), 1.0)[:2] == [Keep(0, 0, 0), Compute(0, 2, 0, HOME)]


def test_what_a_dead_worker_computed_is_next_and_is_computed_afresh() -> None:
    c = apart(Async(), joined=3)
    handle_all(c, 1.0, Done(0, 0, 0), Applied(0))  # and w0 goes on with step 3
    assert c.handle(Left(1, "killed"), 1.5) == []
    effects = c.handle(Done(2, 2, 0), 2.0)
    assert effects == [Keep(2, 2, 0), Compute(2, 1, 0, HOME), Apply(2, (2,))]
    c.handle(Applied(2), 2.0)
    assert c.left_open == [1]
    assert applied(c.handle(Done(2, 1, 0), 3.0)) == (1, (0,), 1)


def test_a_gradient_that_is_lost_with_its_holder_is_computed_afresh() -> None:
    c = apart(Async(), joined=2)
    c.handle(Done(0, 0, 0), 1.0)  # its update is under way
    assert c.handle(Left(0, "killed"), 1.0) == []
    assert c.phase is Phase.COMPUTING
    assert c.handle(Done(1, 1, 0), 2.0) == [Keep(1, 1, 0), Compute(1, 0, 0, HOME), Apply(1, (1,))]
    assert c.handle(Applied(1), 2.0) == []
    assert c.left_open == [0]


def test_at_the_end_nobody_begins_more_than_is_asked_for() -> None:
    c = apart(Async(), steps=4, joined=3)
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


# --- stop and resume ------------------------------------------------------------------------------


def test_a_checkpoint_in_the_middle_says_which_steps_are_open_and_a_resume_begins_them() -> None:
    c = apart(Async(), joined=3)
    handle_all(c, 1.0, Done(2, 2, 0), Applied(2))  # w0 and w1 compute 0 and 1, and w2 3
    assert (c.applied, c.left_open) == (1, [0, 1])
    handle_all(c, 1.0, Done(2, 3, 0), Applied(3), Done(0, 0, 0), Applied(0))
    assert (c.applied, c.left_open) == (3, [1])

    c = apart(Async(), steps=6, joined=0, first_step=1, left_open=[0, 1])
    assert [effect for worker in range(4) for effect in c.handle(Joined(worker), 0.0)] == [
        Compute(0, 0, 0, HOME),
        Compute(1, 1, 0, HOME),
        Compute(2, 3, 0, HOME),  # step 2 is made
        Compute(3, 4, 0, HOME),
    ]
    for worker, step in enumerate([0, 1, 3, 4]):
        handle_all(c, 1.0, Done(worker, step, 0), Applied(step))
    assert handle_all(c, 2.0, Done(0, 5, 0), Applied(5))[-1] == Finish(6, ENDED)


def test_a_stop_finishes_what_is_under_way_and_begins_nothing() -> None:
    c = apart(Async(), joined=3)
    assert c.handle(Stop("SIGTERM"), 0.5) == []
    for worker in (2, 0):
        assert c.handle(Done(worker, worker, 0), 1.0)[:2] == [
            Keep(worker, worker, 0),
            Apply(worker, (worker,)),
        ]
        c.handle(Applied(worker), 1.0)
    assert c.left_open == [1]
    c.handle(Done(1, 1, 0), 3.0)
    effects = c.handle(Applied(1), 3.0)
    assert effects[-1] == Finish(3, "SIGTERM")
    assert c.left_open == []


def test_a_step_that_nobody_has_any_more_is_left_open_by_a_stop() -> None:
    c = apart(Async(), joined=3)
    handle_all(c, 1.0, Done(2, 2, 0), Applied(2), Left(1, "killed"))
    # w0 computes 0, w2 3, and nobody 1.
    assert c.handle(Stop("SIGTERM"), 1.5) == []
    handle_all(c, 2.0, Done(0, 0, 0), Applied(0), Done(2, 3, 0))
    assert c.handle(Applied(3), 2.0) == [Finish(3, "SIGTERM")]
    assert c.left_open == [1]


# --- bounded --------------------------------------------------------------------------------------


def test_whoever_would_be_too_far_ahead_waits() -> None:
    c = apart(Bounded(2), joined=2)  # w1 computes step 1 for a long time
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
        assert late(apart(Bounded(most), joined=2), updates) == min(updates, most)
        assert late(apart(Async(), joined=2), updates) == updates


def test_with_a_bound_of_zero_one_works_at_a_time() -> None:
    c = apart(Bounded(0), joined=2)
    assert c.handle(Done(0, 0, 0), 1.0) == [Keep(0, 0, 0), Apply(0, (0,))]
    assert c.handle(Applied(0), 1.0) == [Compute(0, 1, 0, HOME)]


def test_under_a_bound_nothing_is_copied_and_a_dead_worker_holds_nobody_up() -> None:
    c = apart(Bounded(1), joined=2)
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


# --- after the end --------------------------------------------------------------------------------


def test_what_comes_after_an_abort_during_an_update_does_not_go_on_with_the_run() -> None:
    c = apart(Async(), joined=2)
    c.handle(Done(0, 0, 0), 1.0)  # its update is under way, and it goes on with 2
    c.handle(Failed(1, 1, 0), 1.0)
    assert handle_all(c, 1.0, Left(1, "killed"), Failed(0, 2, 0)) == [Abort(0, 2, 0)]
    assert c.handle(Left(0, "killed"), 2.0) == []
    assert c.phase is Phase.FINISHED


# --- any order of events --------------------------------------------------------------------------


class Draw:
    """A run that may be begun again from a later position: rule, N, V, times and disturbances.

    Stragglers, kills with and without what the worker held, late joins, failures, slow updates; a
    rough one has a timeout too, workers that hang, and crashes.
    """

    def __init__(self, draw: st.DrawFn, kind: str, *, rough: bool) -> None:
        self.workers = workers = draw(st.integers(1, 6))
        shards = draw(st.integers(1, 8))
        self.chance = chance = random.Random(draw(st.integers(0, 1_000_000)))
        speeds = draw(
            st.lists(st.sampled_from([1.0, 1.0, 2.5, 6.0]), min_size=workers, max_size=workers)
        )
        stragglers = draw(st.sampled_from([0.0, 0.1, 0.3]))
        failures = draw(st.sampled_from([0.0, 0.0, 0.0, 0.1, 0.3]))
        hangs = draw(st.sampled_from([0.0, 0.05, 0.2])) if rough else 0.0
        self.stay = draw(st.sampled_from([0.0, 0.5, 1.0]))
        self.crashes = draw(st.sampled_from([0.0, 0.5])) if rough else 0.0
        self.gaps = [
            draw(st.one_of(st.integers(0, 12).map(float), st.floats(0.1, 12.0)))
            for _ in range(workers)
        ]
        self.new_numbers = draw(st.booleans())

        def time_s(worker: int, step: int, shard: int) -> float:
            if chance.random() < hangs:
                return math.inf
            if chance.random() < stragglers:
                return chance.choice([5.0, 20.0, 100.0])
            # Whole seconds: many things happen at one time. Others: nothing does.
            return speeds[worker % workers] * chance.choice([1.0, 1.0, chance.uniform(0.5, 1.5)])

        self.arguments = {
            "time_s": time_s,
            "fails": lambda worker, step, shard: chance.random() < failures,
            "leaves_off_s": draw(st.sampled_from([0.0, 0.5, 3.0, math.inf])),
            "apply_s": draw(st.sampled_from([0.0, 0.0, 0.5, 3.0])),
            "patience": draw(st.sampled_from([1.0, 1.5, 3.0])),
            "attempts": draw(st.integers(2, 9)),
            "timeout_s": draw(st.sampled_from([4.0, 10.0, 30.0])) if rough else None,
            "end_s": draw(st.sampled_from([0.0, 0.5, 3.0])),
            "start_s": draw(st.sampled_from([0.0, 1.0, 7.5])),
            "results_stay": draw(st.booleans()),
        }
        self.rule: Rule
        if kind in ("sync", "quorum"):
            self.rule = Sync() if kind == "sync" else Quorum(draw(st.integers(1, shards + 1)))
            self.steps = draw(st.integers(0, 6))
            self.shards = draw(
                st.lists(st.integers(1, 8) | st.just(shards), min_size=6, max_size=6)
            )
            self.arguments["shards"] = self.shards.__getitem__
        else:
            self.rule = Async() if kind == "async" else Bounded(draw(st.integers(0, 6)))
            self.steps = draw(st.integers(0, 25))
            batch_size = draw(st.integers(shards, 20))
            plan = PlanByShard(rows=draw(st.integers(1, 60)), batch_size=batch_size, shards=shards)
            self.arguments |= {
                "shards": plan.shards_of,
                "home_shards": plan.home_shards,
                "lookahead": plan.lookahead,
                "most_open": draw(st.sampled_from([math.inf, workers, 2 * workers])),
            }

    def simulation(
        self, *, first_step: int = 0, left_open: Iterable[int] = (), tally: Tally | None = None
    ) -> Simulation:
        """The run from a position on, with all that disturbs it."""
        run = Simulation(
            steps=self.steps,
            rule=self.rule,
            first_step=first_step,
            left_open=left_open,
            tally=tally,
            **self.arguments,
        )
        chance = self.chance
        for number, gap in enumerate(self.gaps):
            worker, now = number, gap if number else 0.0
            run.at(now, Joined(worker))
            for _ in range(chance.randint(0, 3)):
                now += chance.choice(self.gaps) + chance.choice([0.0, 0.25, 1.0])
                crashed, stay = chance.random() < self.crashes, chance.random() < self.stay
                run.at(now, Left(worker, "killed", crashed=crashed, results_stay=stay))
                if number > 0 and chance.random() < 0.5:
                    break  # for good, which the first one never is
                now += chance.choice(self.gaps)
                worker += self.workers if self.new_numbers else 0
                run.at(now, Joined(worker))
        return run


KINDS = ["sync", "quorum", "async", "bounded"]


@pytest.mark.parametrize("rough", [False, True], ids=["smooth", "rough"])
@pytest.mark.parametrize("kind", KINDS)
def test_in_any_order_of_events_a_run_ends_after_its_last_update(kind: str, rough: bool) -> None:
    @given(st.data())
    @fixed
    def check(data: st.DataObject) -> None:
        drawn = Draw(data.draw, kind, rough=rough)
        run = drawn.simulation()
        run.run()  # raises InvariantError
        if run.abort is None:
            assert run.finish == Finish(drawn.steps, ENDED)
            assert sorted(run.order) == list(range(drawn.steps))

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_over_stops_and_resumes_every_step_is_applied_once(kind: str) -> None:
    @given(st.data())
    @fixed
    def check(data: st.DataObject) -> None:
        drawn = Draw(data.draw, kind, rough=data.draw(st.booleans()))
        order: list[int] = []
        fates: Counter[str] = Counter()
        run = drawn.simulation()
        for stop_s in [*data.draw(st.lists(st.floats(0.0, 30.0), max_size=3)), math.inf]:
            run.at(stop_s, Stop("SIGTERM"))
            run.run()  # raises InvariantError
            order += run.order
            fates += {fate: count.total() for fate, count in run.fates.items()}
            if run.abort is not None:
                return
            c = run.coordinator
            assert set(order) == set(range(c.applied + len(c.left_open))) - set(c.left_open)
            tally = Tally(json.loads(json.dumps(c.tally.to_json())))
            run = drawn.simulation(first_step=c.applied, left_open=c.left_open, tally=tally)
        assert sorted(order) == list(range(drawn.steps))
        assert {fate: sum(tally.to_json()[fate]) for fate in fates} == fates

    check()


@given(st.data())
@fixed
def test_a_stop_makes_no_more_updates_than_steps_were_under_way(data: st.DataObject) -> None:
    drawn = Draw(data.draw, data.draw(st.sampled_from(KINDS)), rough=False)
    run = drawn.simulation()
    run.at(data.draw(st.floats(0.0, 30.0)), Stop("SIGTERM"))
    while not (run.finish or run.abort or (run.log and run.log[-1][1] == Stop("SIGTERM"))):
        run.advance()
    before = run.applied
    run.run()
    bound = 1 if not drawn.rule.by_shard else min(drawn.rule.staleness + 1, drawn.steps)
    assert run.applied <= before + bound


@pytest.mark.parametrize("rule", [Async(), Bounded(29)], ids=lambda rule: rule.name)
def test_thirty_workers_of_thirty_speeds_are_never_idle(rule: Rule) -> None:
    run = Simulation(
        shards=1, steps=600, rule=rule, time_s=lambda worker, step, shard: 1.0 + worker / 100
    )
    run.at(0.0, *map(Joined, range(30)))
    run.run()
    assert run.finish == Finish(600, ENDED)
    pace = sum(1 / (1.0 + worker / 100) for worker in range(30))
    assert run.now < 600 / pace + 1.3


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("sync", Sync),
        (" sync ", Sync),
        ("quorum:1", Quorum),
        ("quorum:12", Quorum),
        ("async", Async),
        ("bounded:0", Bounded),
        ("bounded:4", Bounded),
    ],
)
def test_a_rule_has_the_name_that_it_is_asked_for_by(text: str, kind: type) -> None:
    rule = rules.parse(text)
    assert type(rule) is kind
    assert rule.name == text.strip()


def test_what_the_coordinator_has_to_know() -> None:
    named = {text: rules.parse(text) for text in ("sync", "quorum:3", "async", "bounded:2")}
    assert {n: [r.needed(v) for v in (1, 3, 5)] for n, r in named.items() if not r.by_shard} == {
        "sync": [1, 3, 5],
        "quorum:3": [1, 3, 3],  # all of a last batch that has fewer
    }
    assert {n: r.needed(1) for n, r in named.items() if r.by_shard} == {"async": 1, "bounded:2": 1}
    assert [rule.staleness for rule in named.values()] == [0, 0, math.inf, 2]
    assert [rule.copies for rule in named.values()] == [True, True, True, False]


@pytest.mark.parametrize(
    ("text", "shards", "keeps"),
    [
        ("sync", 4, True),
        ("quorum:4", 4, True),
        ("quorum:3", 4, False),
        ("async", 1, False),
        ("bounded:0", 1, False),
    ],
)
def test_a_rule_that_may_leave_something_out_or_reorder_does_not_keep_the_bits(
    text: str, shards: int, keeps: bool
) -> None:
    assert rules.keeps_bits(rules.parse(text), shards) is keeps


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        ("", "choose one of them"),
        ("Sync", "choose one of them"),
        ("sync:1", "choose one of them"),
        ("async:", "choose one of them"),
        ("hogwild", "choose one of them"),
        ("quorum", "choose one of them"),
        ("bounded", "choose one of them"),
        ("quorum:", "quorum:R with a whole number: "),
        ("quorum:all", "quorum:R with a whole number: "),
        ("quorum:2.5", "quorum:R with a whole number: "),
        ("quorum:0", "quorum:R with a whole number: R must be at least 1"),
        ("quorum:-1", "quorum:R with a whole number: R must be at least 1"),
        ("bounded:3:4", "bounded:K with a whole number: "),
        ("bounded:-1", "bounded:K with a whole number: K must be at least 0"),
    ],
)
def test_another_text_is_a_mistake_in_one_line_that_names_all_rules(text: str, cure: str) -> None:
    with pytest.raises(SettingError) as caught:
        rules.parse(text)
    message = str(caught.value)
    assert message.startswith(
        f"update: got {text!r}, expected sync, quorum:R, async, bounded:K; {cure}"
    )
    assert "\n" not in message


@pytest.mark.parametrize("value", [None, 3, ["sync"]])
def test_what_is_not_a_text_is_a_mistake_too(value: object) -> None:
    with pytest.raises(SettingError, match="choose one of them"):
        rules.parse(value)  # type: ignore[arg-type]


# --- the tally ------------------------------------------------------------------------------------


def test_a_tally_counts_each_shard_of_each_worker_once() -> None:
    tally = Tally()
    tally.applied(0, 0)
    tally.applied(2, 3)
    tally.applied(2, 1)
    tally.lost(2, dropped=True)
    tally.lost(2, dropped=False)
    assert tally.to_json() == {
        "fresh": [1, 0, 0],
        "stale": [0, 0, 2],
        "dropped": [0, 0, 1],
        "copies": [0, 0, 1],
        "staleness": [4, 3],
    }
    assert [tally.of(worker).begun for worker in range(3)] == [1, 0, 4]


def test_a_tally_says_in_a_line_how_stale_and_whose_were_dropped() -> None:
    tally = Tally()
    assert tally.summary() == "staleness: mean 0.0, max 0; dropped: none"
    for staleness in (0, 1, 5):
        tally.applied(1, staleness)
    assert tally.summary() == "staleness: mean 2.0, max 5; dropped: none"
    for _ in range(1234):
        tally.lost(0, dropped=True)
        tally.lost(2, dropped=False)  # a copy is nobody's loss
    tally.lost(1, dropped=True)
    assert tally.summary() == (
        "staleness: mean 2.0, max 5; dropped: worker 0: 1,234 of 1,234, worker 1: 1 of 4"
    )


def test_a_tally_goes_on_where_a_saved_one_ended() -> None:
    tally = Tally()
    tally.applied(1, 2)
    tally.lost(0, dropped=True)
    saved = json.loads(json.dumps(tally.to_json()))
    again = Tally(saved)
    assert again.to_json() == tally.to_json()
    assert again.summary() == tally.summary()
    for each in (tally, again):
        each.applied(4, 7)
    assert again.to_json() == tally.to_json()
    assert Tally(Tally().to_json()).to_json() == Tally().to_json()


# --- a plan of single shards ----------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, PlanByShard]:
    """A plan, and the same with each shard a step."""
    batch_size = draw(st.integers(1, 40))
    arguments = {
        "rows": draw(st.integers(1, 150)),
        "batch_size": batch_size,
        "shards": draw(st.integers(1, batch_size)),
        "seed": draw(st.integers(0, 5)),
        "shuffle": draw(st.booleans()),
    }
    return Plan(**arguments), PlanByShard(**arguments)


@given(plans(), st.integers(0, 2))
@fixed
def test_the_steps_of_an_epoch_are_the_shards_of_the_plain_plan_in_order(
    both: tuple[Plan, PlanByShard], epoch: int
) -> None:
    plain, single = both
    first = epoch * plain.steps_per_epoch
    shards = [
        plain.shard(step, shard)
        for step in range(first, first + plain.steps_per_epoch)
        for shard in range(plain.shards_of(step))
    ]
    assert single.steps_per_epoch == len(shards)
    first = epoch * single.steps_per_epoch
    for step, rows in enumerate(shards, start=first):
        assert single.shards_of(step) == 1
        assert single.epoch(step) == epoch
        assert single.batch_rows(step) == len(rows) > 0
        assert np.array_equal(single.shard(step, 0), rows)
        assert np.array_equal(single.batch(step), rows)
    assert sorted(np.concatenate(shards).tolist()) == list(range(plain.rows))


def test_a_last_batch_of_fewer_rows_than_shards_has_a_step_per_row() -> None:
    plan = PlanByShard(rows=11, batch_size=8, shards=5, shuffle=False)
    assert plan.steps_per_epoch == 8
    assert [plan.shard(step, 0).tolist() for step in range(8, 16)] == [
        *([0], [1, 2], [3], [4, 5], [6, 7]),
        *([8], [9], [10]),
    ]


@given(plans(), st.integers(1, 12), st.integers(0, 200))
@fixed
def test_each_step_is_at_home_at_one_place_and_a_place_is_at_home_in_a_run_of_each_batch(
    both: tuple[Plan, PlanByShard], workers: int, step: int
) -> None:
    _, plan = both
    homes = [plan.home_shards((rank, workers), step) for rank in range(workers)]
    assert sorted(map(len, homes)) == [0] * (workers - 1) + [1]
    ahead = range(step, step + plan.lookahead)
    for rank in range(workers):
        own = [t for t in ahead if plan.home_shards((rank, workers), t)]
        # Whoever is at home in full batches finds a step within reach.
        if home_shards((rank, workers), plan.shards) and plan.batch_size <= plan.rows:
            assert own or plan.steps_per_epoch % plan.shards


@given(plans())
@fixed
def test_a_plan_is_made_again_from_what_is_saved_of_it(both: tuple[Plan, PlanByShard]) -> None:
    for plan in both:
        again = from_json(json.loads(json.dumps(plan.to_json())))
        assert type(again) is type(plan)
        assert vars(again) == vars(plan)


def test_every_place_is_at_home_as_often_as_the_next() -> None:
    plan = PlanByShard(rows=64, batch_size=16, shards=4)
    for workers in (1, 2, 4):
        counts = Counter(
            rank
            for step, rank in itertools.product(range(16), range(workers))
            if plan.home_shards((rank, workers), step)
        )
        assert set(counts.values()) == {16 // workers}
