"""Shared cores: small cases by hand, and against a processor that is cut into thin slices."""

from __future__ import annotations

import random
from typing import Any

import pytest

import quorate
from quorate.coordination.rules import parse
from quorate.simulation.cores import COORDINATOR, SharedCores
from quorate.simulation.inputs import Cores, Failures, ShardTimes, Stragglers
from quorate.simulation.virtual_run import VirtualRun, Work

EXACT = ShardTimes(mean_s=1.0)
TWO = Cores(per_host=2)


def ends(cores: SharedCores) -> list[tuple[float, int]]:
    found = []
    while cores.next_end() is not None:
        found.append(cores.end())
    return found


def test_jobs_share_cores_by_hand() -> None:
    """Three jobs of 1, 2 and 3 s on two cores: at 2/3 of a core, then each on its own."""
    cores = SharedCores([0] * 3, cores=2, threads=1, crowding=1.0)
    for job in range(3):
        cores.begin(0.0, job, job + 1.0)
    assert ends(cores) == [
        (pytest.approx(1.5), 0),
        (pytest.approx(2.5), 1),
        (pytest.approx(3.5), 2),
    ]


def test_threads_crowding_and_jobs_beside() -> None:
    def alone_and_both(**how: Any) -> list[float]:
        cores = SharedCores([0] * 2, **({"cores": 2, "threads": 1, "crowding": 1.0} | how))
        cores.begin(0.0, 0, 1.0)
        ((alone_s, _),) = ends(cores)
        cores.begin(10.0, 0, 1.0)
        cores.begin(10.0, 1, 1.0)
        return [pytest.approx(alone_s), pytest.approx(ends(cores)[-1][0] - 10.0)]

    assert alone_and_both() == [1.0, 1.0]
    assert alone_and_both(threads=2) == [1.0, 2.0]
    assert alone_and_both(crowding=1.2) == [1.0, 1.2]
    assert alone_and_both(cores=1) == [1.0, 2.0]
    assert alone_and_both(beside=1) == [1.0, 1.5]


def test_hosts_do_not_share_and_the_coordinator_is_on_the_first() -> None:
    cores = SharedCores([0, 1], cores=1, threads=1, crowding=1.0)
    for job in (0, 1, COORDINATOR):
        cores.begin(0.0, job, 1.0)
    assert ends(cores) == [(1.0, 1), (2.0, COORDINATOR), (2.0, 0)]


def test_who_leaves_off_gives_its_share_to_the_others() -> None:
    cores = SharedCores([0, 0], cores=1, threads=1, crowding=1.0)
    cores.begin(0.0, 0, 1.0)
    cores.begin(0.0, 1, 1.0)
    assert cores.leave_off(1.0, 0)
    assert not cores.leave_off(1.0, 0)
    assert ends(cores) == [(pytest.approx(1.5), 1)]


@pytest.mark.parametrize("seed", range(20))
def test_against_thin_slices(seed: int) -> None:
    """Jobs that come at any time, on a processor that gives all of them a slice of 1 ms in turn."""
    chance = random.Random(seed)
    count, cores_of = chance.randint(2, 12), chance.randint(1, 4)
    crowding = chance.choice([1.0, 1.3])
    begins = sorted((chance.uniform(0, 3), job) for job in range(count))
    seconds = [chance.uniform(0.1, 2.0) for _ in range(count)]
    cores = SharedCores([0] * count, cores_of, 1, crowding)
    found: dict[int, float] = {}
    for at, job in begins:
        while (first := cores.next_end()) is not None and first[0] <= at:
            ended_at, ended = cores.end()
            found[ended] = ended_at
        cores.begin(at, job, seconds[job])
    found |= {job: at for at, job in ends(cores)}
    now, left, slow = 0.0, dict(enumerate(seconds)), {}
    while left:
        there = [job for at, job in begins if at <= now and job in left]
        busy = min(len(there), cores_of)
        others = (busy - 1) / (cores_of - 1) if cores_of > 1 and busy > 1 else 0.0
        for job in there:
            left[job] -= 0.001 * min(1.0, cores_of / len(there)) / (1 + (crowding - 1) * others)
            if left[job] <= 0:
                slow[job] = now
                del left[job]
        now += 0.001
    assert found == {job: pytest.approx(at, abs=0.02) for job, at in slow.items()}


def test_more_workers_than_cores_bring_nothing() -> None:
    """4 shards of 1 s take 4, 2 and 2 s on two cores."""
    steps = {
        n: quorate.simulate(n, shards=4, shard_times=EXACT, cores=TWO, steps=20).step_s
        for n in (1, 2, 4)
    }
    assert steps == {1: pytest.approx(4.0), 2: pytest.approx(2.0), 4: pytest.approx(2.0)}
    # Three at 2/3 of a core for 1.5 s; the fourth shard has a core of its own.
    three = quorate.simulate(3, shards=4, shard_times=EXACT, cores=TWO, steps=20)
    assert three.step_s == pytest.approx(2.5)


def test_under_async_updates_take_from_workers_where_cores_are_short() -> None:
    """All the work there is, on two cores: 1 s a shard and 0.5 s for its update."""
    told = quorate.simulate(
        4, update="async", shard_times=EXACT, update_s=0.5, cores=TWO, steps=200
    )
    assert told.running_examples_per_s == pytest.approx(2 / 1.5, rel=0.01)
    # With cores enough the coordinator is what there is one of.
    enough = quorate.simulate(4, update="async", shard_times=EXACT, update_s=0.5, steps=200)
    assert enough.running_examples_per_s == pytest.approx(2.0, rel=0.01)


def test_a_straggler_holds_no_core_while_it_waits() -> None:
    """Two workers of one core: one computes 1 s, the other one too, and then waits for 3 s."""
    run = VirtualRun(
        places=["", ""],
        shards=2,
        batches=3,
        rule=parse("sync"),
        shard_s=lambda worker, *_: Work(1.0, 3.0 * worker),
        patience=1e9,
        cores=SharedCores([0, 0], cores=1, threads=1, crowding=1.0),
    )
    run.play()
    assert [update.at_s for update in run.updates] == [pytest.approx(5.0 * n) for n in (1, 2, 3)]
    slow = Stragglers(steady=[1.0, 5.0])
    told = quorate.simulate(2, update="async", shard_times=EXACT, stragglers=slow, steps=100)
    assert told.running_examples_per_s == pytest.approx(1.2, rel=0.02)


def test_one_worker_that_is_away_for_three_of_ten_seconds() -> None:
    """Of independent workers that fail each is away for restart / (mtbf + restart) of the time."""
    failures = Failures(
        worker_mtbf_h=7 / 3600, coordinator_mtbf_h=float("inf"), detection_s=0.0, restart_s=3.0
    )
    times = ShardTimes(mean_s=0.001)
    told = quorate.simulate(1, shard_times=times, failures=failures, steps=20)
    assert told.goodput == pytest.approx(0.7, rel=0.01)
    # Two whose shards the other one takes: 0.49 of the time both, 0.42 one at half the speed.
    two = quorate.simulate(2, shard_times=times, failures=failures, steps=20)
    assert two.goodput == pytest.approx(0.49 + 0.42 / 2, rel=0.01)


def test_what_is_started_again_takes_a_core() -> None:
    """Two workers on one core: while one is started the other one has half of it, and not all."""
    failures = Failures(
        worker_mtbf_h=1.0, coordinator_mtbf_h=float("inf"), detection_s=0.0, restart_s=30.0
    )
    times, one_core = ShardTimes(mean_s=0.01), Cores(per_host=1)
    told = quorate.simulate(2, shard_times=times, failures=failures, cores=one_core, steps=20)
    away = 2 * 60 / 3660  # a start takes twice as long: the other one computes
    assert 1 - told.goodput == pytest.approx(away / 2, rel=0.05)
