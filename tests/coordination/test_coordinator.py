"""The coordinator: its answers to scripted events, and what holds in any order of events.

Legend: V shards of a step, N workers. w0 is worker 0, and (2, 5) is shard 5 of step 2.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulator import Simulation

from quorate.coordination.coordinator import Coordinator, Phase
from quorate.coordination.plan import home_shards
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
    Replace,
    Stop,
    Tick,
    Wake,
)
from quorate.coordination.rules import Sync
from quorate.errors import ProtocolError

HOME = "home shard"
FREE = "nobody has begun it"
ENDED = "all steps are done"

# The same examples in every run, so that a failure is the change's and not the day's.
fixed = settings(max_examples=300, derandomize=True, deadline=None, database=None)


def behind(worker: int) -> str:
    return f"worker {worker} is slow: far behind its usual time"


def slow(worker: int) -> str:
    return f"worker {worker} is slow"


def coordinator(
    shards: int,
    steps: int = 1,
    *,
    joined: int = 0,
    attempts: int = 2,
    timeout_s: float | None = None,
) -> Coordinator:
    """A coordinator of ``steps`` steps, and workers 0 to ``joined`` - 1 that joined at time 0."""
    made = Coordinator(
        shards_of=lambda step: shards,
        first_step=0,
        last_step=steps,
        rule=Sync(),
        attempts=attempts,
        timeout_s=timeout_s,
    )
    for worker in range(joined):
        made.handle(Joined(worker), 0.0)
    return made


def handle_all(coordinator: Coordinator, now: float, *events: Event) -> list[Effect]:
    """All effects of some events at one time."""
    return [effect for event in events for effect in coordinator.handle(event, now)]


# --- who computes what ----------------------------------------------------------------------------


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


# --- stragglers -----------------------------------------------------------------------------------


def straggling(attempts: int = 2, timeout_s: float | None = None) -> Coordinator:
    """V = 2, N = 3: w0 and w1 took 1 s each in step 0; w1 began (1, 1) at 10 and is not back."""
    c = coordinator(shards=2, steps=4, joined=3, attempts=attempts, timeout_s=timeout_s)
    handle_all(c, 1.0, Done(0, 0, 0), Done(1, 0, 1))
    c.handle(Applied(0), 10.0)
    return c


def test_substitutes_are_idle_until_someone_is_far_behind() -> None:
    c = coordinator(shards=2, steps=4)
    handle_all(c, 0.0, Joined(0), Joined(1))
    assert c.handle(Joined(2), 0.0) == []  # no usual time is known yet, so no one is behind it
    assert c.handle(Tick(), 100.0) == []
    assert c.handle(Done(0, 0, 0), 101.0) == [
        Keep(0, 0, 0),
        Wake(151.5),  # w1 has no time of its own, and w0's was 101 s
    ]


def test_a_straggler_is_duplicated_after_patience_times_its_usual_time() -> None:
    c = straggling()
    assert c.handle(Done(0, 1, 0), 11.0) == [Keep(0, 1, 0), Wake(11.5)]
    assert c.handle(Tick(), 11.25) == [Wake(11.5)]
    assert c.handle(Tick(), 11.5) == [Compute(0, 1, 1, behind(1))]
    assert c.handle(Tick(), 99.0) == []  # w2 is idle, and two copies are enough


def test_the_first_of_two_copies_is_kept_and_the_late_one_discarded_steps_later() -> None:
    c = straggling()
    handle_all(c, 11.5, Done(0, 1, 0))  # and w0 takes the copy
    assert c.handle(Done(0, 1, 1), 12.5) == [Keep(0, 1, 1), Apply(1, (0,))]
    assert c.handle(Applied(1), 13.0) == [
        Cancel(1, 1, 1),
        Compute(0, 2, 0, HOME),
        Compute(2, 2, 1, FREE),
    ]
    handle_all(c, 14.0, Done(0, 2, 0), Done(2, 2, 1))
    c.handle(Applied(2), 15.0)
    assert c.handle(Done(1, 1, 1), 15.5)[0] == Discard(1, 1, 1)
    assert handle_all(c, 16.0, Done(0, 3, 0), Done(2, 3, 1))[-1] == Apply(3, (0, 2))
    assert c.handle(Applied(3), 17.0) == [Finish(4, ENDED)]


def test_a_straggler_that_leaves_off_when_it_is_told_to_gets_a_shard_of_the_step_under_way() -> (
    None
):
    c = straggling()
    handle_all(c, 11.5, Done(0, 1, 0))  # and w0 takes the copy
    c.handle(Done(0, 1, 1), 12.5)
    assert c.handle(Applied(1), 13.0)[0] == Cancel(1, 1, 1)
    assert c.handle(Left(2, "killed"), 13.0) == []  # it computed (2, 1)
    assert c.handle(Cancelled(1, 1, 1), 13.1) == [Compute(1, 2, 1, HOME)]


def test_a_straggler_that_is_back_first_is_kept_and_its_copy_discarded() -> None:
    c = straggling()
    handle_all(c, 11.5, Done(0, 1, 0))
    assert c.handle(Done(1, 1, 1), 11.75) == [Keep(1, 1, 1), Apply(1, (0, 1))]
    assert c.handle(Done(0, 1, 1), 12.0) == [Discard(0, 1, 1)]  # the update is under way
    assert c.handle(Applied(1), 13.0)[:2] == [Compute(0, 2, 0, HOME), Compute(1, 2, 1, HOME)]


def test_the_furthest_behind_is_duplicated_first() -> None:
    c = coordinator(shards=3, steps=2, joined=3)
    c.handle(Done(2, 0, 1), 1.0)
    c.handle(Done(0, 0, 0), 1.125)
    c.handle(Done(1, 0, 2), 1.25)
    c.handle(Applied(0), 10.0)  # w2 is behind at 11.5, w0 at 11.6875, w1 at 11.875
    assert c.handle(Joined(3), 12.0) == [Compute(3, 1, 2, behind(2))]
    assert c.handle(Joined(4), 12.0) == [Compute(4, 1, 0, behind(0))]
    assert c.handle(Joined(5), 12.0) == [Compute(5, 1, 1, behind(1))]
    assert c.handle(Joined(6), 12.0) == []


def test_a_hung_worker_delays_the_run_and_does_not_stop_it() -> None:
    run = Simulation(
        shards=3,
        steps=5,
        time_s=lambda worker, step, shard: math.inf if (worker, step) == (1, 2) else 1.0,
    )
    run.at(0.0, Joined(0), Joined(1), Joined(2))
    run.run()
    assert run.finish == Finish(5, ENDED)
    assert run.copies == 1
    assert run.now == pytest.approx(1 + 1 + (1.5 + 1) + 2 + 2)


# --- slow workers ---------------------------------------------------------------------------------


def uneven(*times_s: float) -> Coordinator:
    """V = N, worker w usually takes ``times_s[w]``, w0 1 s, and began (1, w) at 20."""
    count = len(times_s)
    c = Coordinator(
        shards_of=lambda step: count + 2 if step == 0 else count,
        first_step=0,
        last_step=3,
        rule=Sync(),
    )
    ends: dict[int, Done] = {}

    def handle(event: Event, now: float) -> None:
        for effect in c.handle(event, now):
            if isinstance(effect, Compute):
                ends[effect.worker] = Done(effect.worker, effect.step, effect.shard)

    # w0 does three, so that one odd time does not change what is usual for it.
    for worker in reversed(range(count)):
        handle(Joined(worker), 17.0 if worker == 0 else 20.0 - times_s[worker])
    handle(ends[0], 18.0)
    handle(ends[0], 19.0)
    for worker in reversed(range(count)):
        handle(ends[worker], 20.0)
    assert c.phase is Phase.APPLYING
    assert c.handle(Applied(0), 20.0) == [Compute(w, 1, w, HOME) for w in range(count)]
    return c


def test_a_shard_of_a_slow_worker_is_duplicated_as_soon_as_another_is_idle() -> None:
    c = uneven(1.0, 10.0)
    # It would take until 30, and is far behind only at 35.
    assert c.handle(Done(0, 1, 0), 21.0) == [Keep(0, 1, 0), Compute(0, 1, 1, slow(1))]
    assert c.handle(Done(0, 1, 1), 22.0) == [Keep(0, 1, 1), Apply(1, (0,))]
    # It goes on with what nobody needs, if it cannot leave off, and the next step does without it.
    assert c.handle(Applied(1), 22.0) == [Cancel(1, 1, 1), Compute(0, 2, 0, HOME)]
    assert c.handle(Done(0, 2, 0), 23.0) == [Keep(0, 2, 0), Compute(0, 2, 1, FREE)]
    assert c.handle(Done(0, 2, 1), 24.0) == [Keep(0, 2, 1), Apply(2, (0,))]
    assert c.handle(Done(1, 1, 1), 30.0) == [Discard(1, 1, 1)]


def test_a_slow_worker_that_is_done_about_as_soon_is_waited_for() -> None:
    c = uneven(1.0, 4.0)  # w1 is done at 24, and w0 at 22.5 + 1.5 times its usual time
    assert c.handle(Done(0, 1, 0), 22.5) == [Keep(0, 1, 0), Wake(26.0)]
    assert c.handle(Done(1, 1, 1), 24.0) == [Keep(1, 1, 1), Apply(1, (0, 1))]


def test_of_two_slow_workers_the_one_that_would_be_done_last_is_duplicated_first() -> None:
    c = uneven(1.0, 10.0, 20.0)
    assert c.handle(Done(0, 1, 0), 21.0) == [Keep(0, 1, 0), Compute(0, 1, 2, slow(2))]
    assert c.handle(Done(0, 1, 2), 22.0) == [Keep(0, 1, 2), Compute(0, 1, 1, slow(1))]


def test_one_far_behind_is_duplicated_before_one_that_is_slow() -> None:
    c = uneven(1.0, 4.0, 20.0)  # w1 is far behind at 26, w2 would be done at 40
    assert c.handle(Done(0, 1, 0), 26.5) == [Keep(0, 1, 0), Compute(0, 1, 1, behind(1))]
    assert c.handle(Done(0, 1, 1), 27.5) == [Keep(0, 1, 1), Compute(0, 1, 2, slow(2))]


def test_a_shard_of_a_slow_worker_is_not_tried_again_where_it_failed() -> None:
    c = uneven(1.0, 10.0)
    assert c.handle(Failed(0, 1, 0), 21.0) == [Compute(0, 1, 1, slow(1))]
    assert c.handle(Failed(0, 1, 1), 22.0) == [Wake(35.0)]
    assert c.handle(Done(1, 1, 1), 30.0)[:2] == [Keep(1, 1, 1), Compute(1, 1, 0, FREE)]
    assert c.handle(Tick(), 36.0) == [Wake(45.0)]  # shard 0, and w0 is idle


def one_may_be_slow(shards: int, workers: Iterable[int], slow: int | None) -> Simulation:
    """60 steps; a shard takes 0.8 to 1.2 s, and 10 times that on the slow worker."""
    chance = random.Random(0)

    def time_s(worker: int, step: int, shard: int) -> float:
        return chance.uniform(0.8, 1.2) * (10.0 if worker == slow else 1.0)

    run = Simulation(shards=shards, steps=60, time_s=time_s)
    run.at(0.0, *map(Joined, workers))
    run.run()
    return run


@pytest.mark.parametrize("slow", ["first", "last"])
@pytest.mark.parametrize(
    ("shards", "workers"),
    [(8, 3), (2, 2), (2, 3), (3, 3), (4, 4), (5, 3), (9, 4), (16, 16), (32, 8)],
)
def test_a_permanently_slow_worker_costs_a_fifth_of_the_pace_at_most(
    shards: int, workers: int, slow: str
) -> None:
    number = 0 if slow == "first" else workers - 1
    without = one_may_be_slow(shards, [w for w in range(workers) if w != number], None)
    run = one_may_be_slow(shards, range(workers), number)
    assert run.now < 1.2 * without.now
    steps_s = [end - begin for begin, end in itertools.pairwise([0.0, *run.applied_at])]
    assert max(steps_s) < 8.0  # no step waits for what it takes there: 8 s at least


# --- workers that leave ---------------------------------------------------------------------------


def test_a_worker_killed_while_computing_has_its_shard_dealt_again() -> None:
    c = coordinator(shards=2, joined=3)
    assert c.handle(Left(1, "killed"), 0.5) == [Compute(2, 0, 1, HOME)]


def test_a_shard_waits_in_nobodys_hands_when_all_others_are_busy() -> None:
    c = coordinator(shards=2, joined=2)
    assert c.handle(Left(1, "killed"), 0.5) == []
    assert c.handle(Done(0, 0, 0), 1.0) == [Keep(0, 0, 0), Compute(0, 0, 1, HOME)]


def test_a_worker_killed_while_holding_shards_has_them_dealt_again() -> None:
    c = coordinator(shards=4, joined=2)
    handle_all(c, 1.0, Done(1, 0, 2))  # w1 goes on with shard 3
    assert c.handle(Left(1, "killed"), 1.5) == []
    assert c.handle(Done(0, 0, 0), 2.0) == [Keep(0, 0, 0), Compute(0, 0, 1, HOME)]
    assert c.handle(Done(0, 0, 1), 3.0) == [Keep(0, 0, 1), Compute(0, 0, 2, HOME)]
    assert c.handle(Done(0, 0, 2), 4.0) == [Keep(0, 0, 2), Compute(0, 0, 3, HOME)]
    assert c.handle(Done(0, 0, 3), 5.0) == [Keep(0, 0, 3), Apply(0, (0,))]


def test_a_holder_killed_during_the_update_has_its_shards_dealt_again() -> None:
    c = coordinator(shards=2, steps=2, joined=2)
    assert handle_all(c, 1.0, Done(0, 0, 0), Done(1, 0, 1))[-1] == Apply(0, (0, 1))
    assert c.handle(Left(1, "killed"), 1.5) == [Compute(0, 0, 1, HOME)]
    assert c.phase is Phase.COMPUTING
    assert c.handle(Done(0, 0, 1), 2.5) == [Keep(0, 0, 1), Apply(0, (0,))]
    assert c.handle(Applied(0), 3.0) == [Compute(0, 1, 0, HOME)]


def test_a_worker_that_holds_nothing_may_leave_during_the_update() -> None:
    c = coordinator(shards=1, steps=2, joined=2)
    c.handle(Done(0, 0, 0), 1.0)
    assert c.handle(Left(1, "killed"), 1.5) == []
    assert c.handle(Applied(0), 2.0) == [Compute(0, 1, 0, HOME)]


def test_a_late_copy_takes_the_place_of_one_that_was_lost_with_its_holder() -> None:
    c = straggling()
    handle_all(c, 11.5, Done(0, 1, 0))
    c.handle(Done(0, 1, 1), 12.0)  # w0 holds both, and w1 still computes its copy of (1, 1)
    assert c.handle(Left(0, "killed"), 12.0) == [Compute(2, 1, 0, FREE)]
    assert c.handle(Done(1, 1, 1), 12.25)[0] == Keep(1, 1, 1)
    assert c.handle(Done(2, 1, 0), 13.0) == [Keep(2, 1, 0), Apply(1, (1, 2))]


def test_a_run_that_all_workers_left_ends_with_a_new_one() -> None:
    run = Simulation(shards=3, steps=4)
    run.at(0.0, Joined(0), Joined(1))
    run.at(2.5, Left(0, "killed"))
    run.at(3.0, Left(1, "killed"))
    run.at(100.0, Joined(2))
    run.run()
    assert run.finish == Finish(4, ENDED)
    assert run.now == 100.0 + 3 * 3  # step 0 was applied before


def test_a_worker_that_is_back_under_its_old_number_begins_afresh() -> None:
    c = coordinator(shards=2, joined=2)
    c.handle(Left(0, "killed"), 0.5)
    assert c.handle(Joined(0), 1.0) == [Compute(0, 0, 0, HOME)]


def test_what_a_worker_held_counts_when_its_results_stay() -> None:
    c = coordinator(shards=4, joined=2)
    handle_all(c, 1.0, Done(1, 0, 2))  # w1 goes on with shard 3
    assert c.handle(Left(1, "killed", results_stay=True), 1.5) == []
    assert c.handle(Done(0, 0, 0), 2.0) == [Keep(0, 0, 0), Compute(0, 0, 1, HOME)]
    assert c.handle(Done(0, 0, 1), 3.0) == [Keep(0, 0, 1), Compute(0, 0, 3, HOME)]
    assert c.handle(Done(0, 0, 3), 4.0) == [Keep(0, 0, 3), Apply(0, (0, 1))]


def test_a_holder_whose_results_stay_may_leave_during_the_update() -> None:
    c = coordinator(shards=2, steps=2, joined=2)
    handle_all(c, 1.0, Done(0, 0, 0), Done(1, 0, 1))
    assert c.handle(Left(1, "killed", results_stay=True), 1.5) == []
    assert c.phase is Phase.APPLYING
    assert c.handle(Applied(0), 2.0) == [Compute(0, 1, 0, HOME)]


def test_a_worker_that_is_back_goes_on_where_its_results_stayed() -> None:
    c = coordinator(shards=2, joined=1)
    c.handle(Done(0, 0, 0), 1.0)
    assert c.handle(Left(0, "killed", results_stay=True), 1.5) == []
    assert c.handle(Joined(0), 2.0) == [Compute(0, 0, 1, HOME)]
    assert c.handle(Done(0, 0, 1), 3.0) == [Keep(0, 0, 1), Apply(0, (0,))]


# --- failures -------------------------------------------------------------------------------------


def test_a_shard_that_failed_once_is_tried_on_another_worker_and_not_on_the_same() -> None:
    c = coordinator(shards=3, joined=2)  # w0 is at home in 0 and 1, w1 in 2
    assert c.handle(Failed(0, 0, 0), 1.0) == [Compute(0, 0, 1, HOME)]
    # It is idle now, and waits for w1 to be far behind rather than to try again.
    assert c.handle(Done(0, 0, 1), 5.0) == [Keep(0, 0, 1), Wake(6.0)]
    assert c.handle(Done(1, 0, 2), 5.5) == [Keep(1, 0, 2), Compute(1, 0, 0, FREE), Wake(13.75)]
    assert c.handle(Done(1, 0, 0), 6.5) == [Keep(1, 0, 0), Apply(0, (0, 1))]


def test_a_shard_that_failed_on_two_workers_ends_the_run() -> None:
    c = coordinator(shards=2, joined=3)
    assert c.handle(Failed(0, 0, 0), 1.0) == [Compute(2, 0, 0, FREE)]
    assert c.handle(Failed(2, 0, 0), 2.0) == [Abort(2, 0, 0)]
    assert c.phase is Phase.FINISHED


def test_a_failure_on_the_only_worker_ends_the_run_at_once() -> None:
    c = coordinator(shards=2, joined=1)
    assert c.handle(Failed(0, 0, 0), 1.0) == [Abort(0, 0, 0)]


def test_a_failure_on_every_worker_ends_the_run_before_all_attempts_are_made() -> None:
    c = coordinator(shards=2, joined=2, attempts=5)
    handle_all(c, 1.0, Failed(0, 0, 0), Done(1, 0, 1))
    assert c.handle(Failed(1, 0, 0), 2.0) == [Abort(1, 0, 0)]


def test_a_failure_of_a_copy_that_nobody_needs_changes_nothing() -> None:
    c = straggling()
    handle_all(c, 11.5, Done(0, 1, 0))
    handle_all(c, 12.0, Done(0, 1, 1))
    c.handle(Applied(1), 13.0)
    effects = c.handle(Failed(1, 1, 1), 13.5)
    assert not [e for e in effects if not isinstance(e, Wake)]


def test_a_failure_counts_in_its_step_only() -> None:
    c = coordinator(shards=1, steps=2, joined=2)
    c.handle(Failed(0, 0, 0), 1.0)
    c.handle(Done(1, 0, 0), 2.0)
    c.handle(Applied(0), 3.0)  # (1, 0) goes to w0
    assert c.handle(Failed(0, 1, 0), 4.0) == [Compute(1, 1, 0, FREE), Wake(5.5)]


def test_a_shard_is_tried_again_where_it_failed_when_nobody_else_is_left_to_try_it() -> None:
    c = coordinator(shards=1, joined=2)
    assert c.handle(Failed(0, 0, 0), 1.0) == [Compute(1, 0, 0, FREE)]
    assert [effect.worker for effect in c.handle(Left(1, "killed"), 2.0)] == [0]
    assert c.handle(Failed(0, 0, 0), 3.0) == [Abort(0, 0, 0)]


# --- crashes --------------------------------------------------------------------------------------


def test_a_shard_that_crashed_a_worker_is_tried_on_another_and_not_on_its_successor() -> None:
    c = coordinator(shards=2, joined=2)
    assert c.handle(Left(0, "SIGSEGV", crashed=True), 1.0) == []
    assert c.handle(Joined(0), 1.5) == []
    assert c.handle(Done(1, 0, 1), 2.0)[:2] == [Keep(1, 0, 1), Compute(1, 0, 0, FREE)]


def test_a_shard_that_crashed_two_workers_ends_the_run() -> None:
    c = coordinator(shards=2, joined=3)
    assert c.handle(Left(0, "SIGSEGV", crashed=True), 1.0) == [Compute(2, 0, 0, FREE)]
    assert c.handle(Left(2, "SIGSEGV", crashed=True), 2.0) == [Abort(2, 0, 0)]
    assert c.phase is Phase.FINISHED


def test_a_shard_that_crashed_the_only_worker_twice_ends_the_run() -> None:
    c = coordinator(shards=2, joined=1)
    assert c.handle(Left(0, "SIGSEGV", crashed=True), 1.0) == []
    assert c.handle(Joined(0), 2.0) == [Compute(0, 0, 0, HOME)]
    assert c.handle(Left(0, "SIGSEGV", crashed=True), 3.0) == [Abort(0, 0, 0)]


def test_a_crash_and_a_failure_of_a_shard_count_alike() -> None:
    c = coordinator(shards=2, joined=3)
    c.handle(Left(0, "SIGSEGV", crashed=True), 1.0)  # and w2 takes (0, 0)
    assert c.handle(Failed(2, 0, 0), 2.0) == [Abort(2, 0, 0)]


def test_a_worker_that_is_killed_is_no_failure_of_its_shard() -> None:
    c = coordinator(shards=1, joined=1, attempts=1)
    assert handle_all(c, 1.0, Left(0, "killed"), Joined(0)) == [Compute(0, 0, 0, HOME)]


def test_a_crash_with_idle_hands_or_over_a_copy_that_nobody_needs_is_no_failure() -> None:
    c = straggling(attempts=1)
    assert c.handle(Left(2, "SIGSEGV", crashed=True), 11.0) == []
    handle_all(c, 11.5, Done(0, 1, 0))  # and w0 takes the copy
    assert c.handle(Done(0, 1, 1), 12.5) == [Keep(0, 1, 1), Apply(1, (0,))]
    assert c.handle(Left(1, "SIGSEGV", crashed=True), 12.75) == []
    assert c.handle(Applied(1), 13.0) == [Compute(0, 2, 0, HOME)]


# --- silence --------------------------------------------------------------------------------------


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


# --- stops ----------------------------------------------------------------------------------------


def test_a_stop_in_the_middle_of_a_step_finishes_that_step() -> None:
    c = coordinator(shards=2, steps=9, joined=1)
    assert c.handle(Stop("SIGTERM"), 0.5) == []
    assert c.handle(Done(0, 0, 0), 1.0) == [Keep(0, 0, 0), Compute(0, 0, 1, HOME)]
    assert c.handle(Done(0, 0, 1), 2.0) == [Keep(0, 0, 1), Apply(0, (0,))]
    assert c.handle(Applied(0), 3.0) == [Finish(1, "SIGTERM")]


def test_a_stop_during_an_update_ends_the_run_after_it() -> None:
    c = coordinator(shards=1, steps=9, joined=1)
    c.handle(Done(0, 0, 0), 1.0)
    assert c.handle(Stop("SIGTERM"), 1.5) == []
    assert c.handle(Applied(0), 2.0) == [Finish(1, "SIGTERM")]


def test_a_stop_before_anything_has_begun_ends_the_run_at_once() -> None:
    assert coordinator(shards=2, steps=9).handle(Stop("SIGTERM"), 0.0) == [Finish(0, "SIGTERM")]


def test_a_stop_when_all_of_a_step_was_lost_ends_the_run_at_once() -> None:
    c = coordinator(shards=2, steps=9, joined=1)
    handle_all(c, 1.0, Done(0, 0, 0), Left(0, "killed"))
    assert c.handle(Stop("SIGTERM"), 2.0) == [Finish(0, "SIGTERM")]


def test_the_reason_of_the_first_stop_counts() -> None:
    c = coordinator(shards=1, steps=9, joined=1)
    handle_all(c, 0.5, Stop("first"), Stop("second"))
    c.handle(Done(0, 0, 0), 1.0)
    assert c.handle(Applied(0), 2.0) == [Finish(1, "first")]


def test_what_comes_after_the_end_has_no_effect_but_on_results() -> None:
    c = straggling()
    handle_all(c, 11.5, Done(0, 1, 0), Stop("SIGTERM"))  # and w0 takes the copy
    c.handle(Done(0, 1, 1), 12.5)
    assert c.handle(Applied(1), 13.0) == [Cancel(1, 1, 1), Finish(2, "SIGTERM")]
    assert c.handle(Done(1, 1, 1), 14.0) == [Discard(1, 1, 1)]
    assert handle_all(c, 15.0, Left(1, "killed"), Joined(1), Stop("again"), Tick()) == []


# --- events that cannot happen --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Joined(0), "worker 0 joined twice"),
        (Left(5, "killed"), "worker 5 left and had not joined"),
        (Done(0, 0, 1), "worker 0 was not computing step 0, shard 1"),
        (Done(0, 1, 0), "worker 0 was not computing step 1, shard 0"),
        (Done(5, 0, 0), "worker 5 was not computing step 0, shard 0"),
        (Failed(1, 0, 0), "worker 1 was not computing step 0, shard 0"),
        (Cancelled(0, 0, 0), "worker 0 left off what it was not told to"),
        (Applied(0), "no update of step 0 was asked for"),
    ],
    ids=str,
)
def test_an_impossible_event_is_refused_with_the_events_before_it(
    event: Event, message: str
) -> None:
    c = coordinator(shards=2, joined=2)
    with pytest.raises(ProtocolError) as caught:
        c.handle(event, 1.0)
    assert str(caught.value) == "\n".join(
        [
            f"{message} (after 0 updates, computing)",
            "last events, oldest first:",
            "  Joined(worker=0)",
            "  Joined(worker=1)",
            f"  {event}",
        ]
    )


def test_an_update_of_another_step_is_refused() -> None:
    c = coordinator(shards=1, steps=2, joined=1)
    c.handle(Done(0, 0, 0), 1.0)
    with pytest.raises(ProtocolError, match="no update of step 1 was asked for"):
        c.handle(Applied(1), 2.0)


def test_a_protocol_error_carries_twenty_events_at_most() -> None:
    c = coordinator(shards=1, joined=1)
    handle_all(c, 0.0, *[Tick()] * 50)
    with pytest.raises(ProtocolError) as caught:
        c.handle(Joined(0), 1.0)
    assert len(str(caught.value).splitlines()) == 2 + 20


# --- any order of events --------------------------------------------------------------------------


@st.composite
def runs(draw: st.DrawFn, *, rough: bool = False) -> Simulation:
    """N in 1..6, V in 1..12 and up to 6 steps, with stragglers, kills and late joins.

    A rough one has a timeout, workers that hang, crashes, and results that outlive a worker.
    """
    workers = draw(st.integers(1, 6))
    shards = draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))  # per step
    speeds = draw(st.lists(st.sampled_from([1.0, 1.0, 2.5]), min_size=workers, max_size=workers))
    chance = random.Random(draw(st.integers(0, 1_000_000)))
    stragglers = draw(st.sampled_from([0.0, 0.1, 0.3]))
    failures = draw(st.sampled_from([0.0, 0.0, 0.1, 0.3]))
    hangs = draw(st.sampled_from([0.0, 0.05, 0.2])) if rough else 0.0
    stay = draw(st.sampled_from([0.0, 0.5, 1.0])) if rough else 0.0
    crashes = draw(st.sampled_from([0.0, 0.5])) if rough else 0.0

    def left(worker: int) -> Left:
        crashed, results_stay = chance.random() < crashes, chance.random() < stay
        return Left(worker, "killed", crashed=crashed, results_stay=results_stay)

    def time_s(worker: int, step: int, shard: int) -> float:
        if chance.random() < hangs:
            return math.inf
        if chance.random() < stragglers:
            return chance.choice([5.0, 20.0, 100.0])
        # Whole seconds: many things happen at one time. Others: nothing does.
        return speeds[worker % workers] * chance.choice([1.0, 1.0, chance.uniform(0.5, 1.5)])

    run = Simulation(
        shards=shards.__getitem__,
        steps=len(shards),
        time_s=time_s,
        fails=lambda worker, step, shard: chance.random() < failures,
        apply_s=draw(st.sampled_from([0.0, 0.5, 3.0])),
        patience=draw(st.sampled_from([1.0, 1.5, 3.0])),
        attempts=draw(st.integers(1, 3)) if failures else draw(st.integers(2, 9)) if rough else 2,
        timeout_s=draw(st.sampled_from([4.0, 10.0, 30.0])) if rough else None,
        end_s=draw(st.sampled_from([0.0, 0.5, 3.0])) if rough else 0.0,
        start_s=draw(st.sampled_from([0.0, 1.0, 7.5])) if rough else 1.0,
        results_stay=draw(st.booleans()) if rough else False,
    )
    gaps = st.one_of(st.integers(0, 12).map(float), st.floats(0.1, 12.0))
    new_numbers = draw(st.booleans())
    for number in range(workers):
        worker, now = number, draw(gaps) if number else 0.0
        run.at(now, Joined(worker))
        for _ in range(draw(st.integers(0, 3))):
            now += draw(gaps)
            run.at(now, left(worker))
            if number > 0 and draw(st.booleans()):
                break  # for good, which the first one never is
            now += draw(gaps)
            worker += workers if new_numbers else 0
            run.at(now, Joined(worker))
    return run


@given(runs())
@fixed
def test_in_any_order_of_events_the_run_ends_with_the_same_sums(run: Simulation) -> None:
    run.run()  # raises InvariantError
    if run.abort is None:
        assert run.finish == Finish(run.steps, ENDED)


@given(runs(rough=True))
@fixed
def test_hung_and_crashed_workers_change_no_sum(run: Simulation) -> None:
    run.run()  # raises InvariantError
    if run.abort is None:
        assert run.finish == Finish(run.steps, ENDED)


@given(st.integers(1, 5), st.integers(1, 8), st.booleans(), st.integers(0, 1_000_000))
@fixed
def test_a_run_survives_workers_that_hang_again_and_again(
    workers: int, shards: int, results_stay: bool, seed: int
) -> None:
    chance = random.Random(seed)
    run = Simulation(
        shards=shards,
        steps=10,
        time_s=lambda worker, step, shard: math.inf if chance.random() < 0.2 else 1.0,
        timeout_s=5.0,
        attempts=100,
        end_s=0.25,
        results_stay=results_stay,
    )
    run.at(0.0, *map(Joined, range(workers)))
    run.run()
    assert run.finish == Finish(10, ENDED)


@given(st.one_of(runs(), runs(rough=True)), st.floats(0.0, 40.0))
@fixed
def test_in_any_order_of_events_a_stop_ends_the_run_within_a_step(
    run: Simulation, time_s: float
) -> None:
    run.at(time_s, Stop("SIGTERM"))
    while not (run.finish or run.abort or (run.log and run.log[-1][1] == Stop("SIGTERM"))):
        run.advance()
    under_way = run.applied
    run.run()
    assert run.applied <= under_way + 1


@given(st.integers(1, 12), st.integers(1, 8))
@fixed
def test_an_undisturbed_step_takes_as_long_as_the_most_shards_of_a_worker(
    shards: int, workers: int
) -> None:
    run = Simulation(shards=shards, steps=3)
    run.at(0.0, *map(Joined, range(workers)))
    run.run()
    assert run.now == 3 * math.ceil(shards / workers)
    assert run.copies == 0


def test_five_hundred_workers_compute_five_hundred_shards() -> None:
    run = Simulation(shards=500, steps=1)
    run.at(0.0, *map(Joined, range(500)))
    run.run()
    assert run.finish == Finish(1, ENDED)
    assert set(run.computed.values()) == {1}
