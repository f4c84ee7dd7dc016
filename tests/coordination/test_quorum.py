"""Quorum: the first R shards of a step make its update; who is late is told, dropped and counted.

Legend: V shards of a step, N workers. w0 is worker 0, and (2, 5) is shard 5 of step 2.
"""

from __future__ import annotations

import random

from support.scripted import (
    FREE,
    HOME,
    applied,
    handle_all,
)
from support.shown_sums import whole_sum
from support.simulator import Simulation

from quorate.coordination.coordinator import Coordinator, Phase
from quorate.coordination.protocol import (
    Applied,
    Apply,
    Cancel,
    Cancelled,
    Compute,
    Discard,
    Done,
    Effect,
    Joined,
    Keep,
    Left,
    Tick,
    Wake,
)
from quorate.coordination.rules import Quorum, Rule, Sync
from quorate.coordination.tally import Tally


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
