"""Copies: a shard whose worker is late or slow is computed by another too; the first one counts.

Legend: V shards of a step, N workers. w0 is worker 0, and (2, 5) is shard 5 of step 2.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable

import pytest
from support.scripted import (
    ENDED,
    FREE,
    HOME,
    behind,
    coordinator,
    handle_all,
    slow,
    straggling,
)
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
    Event,
    Failed,
    Finish,
    Joined,
    Keep,
    Left,
    Tick,
    Wake,
)
from quorate.coordination.rules import Sync


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
