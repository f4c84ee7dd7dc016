"""Virtual runs: small ones by hand, larger ones against closed forms and the judged simulator."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import fmean

import pytest
from support.messages import expect_error
from support.simulator import Simulation

from quorate.coordination.protocol import Joined
from quorate.coordination.rules import parse
from quorate.errors import ProtocolError
from quorate.simulation.virtual_run import Failure, VirtualRun


def times(run: VirtualRun) -> list[float]:
    return [pytest.approx(update.at_s) for update in run.updates]


def test_a_synchronous_step_takes_as_long_as_its_slowest_shard() -> None:
    drawn: dict[int, list[float]] = {}
    chance = random.Random(0)

    def shard_s(worker: int, step: int, shard: int) -> float:
        drawn.setdefault(step, []).append(chance.uniform(1.0, 1.4))  # too little for a copy
        return drawn[step][-1]

    run = VirtualRun(places=[""] * 8, shards=8, batches=20, rule=parse("sync"), shard_s=shard_s)
    run.play()
    ends = [0.0, *(update.at_s for update in run.updates)]
    assert [after - before for before, after in pairwise(ends)] == [
        pytest.approx(max(drawn[step])) for step in range(20)
    ]
    assert run.begun == 8 * 20
    assert run.copies == 0


def test_updates_and_messages_are_added_to_each_step() -> None:
    run = VirtualRun(
        places=["a", "b"],
        shards=2,
        batches=3,
        rule=parse("sync"),
        shard_s=lambda worker, *_: 1.0 + worker,
        apply_s=lambda holders: 0.1 * holders,
        latency_s=0.05,
    )
    run.play()
    # There and back, the slower worker's 2 s, an update of two holders.
    assert times(run) == [2.3, 4.6, 6.9]


@pytest.mark.parametrize(("workers", "needed"), [(8, 6), (20, 18)])
def test_a_quorum_takes_the_order_statistic_of_exponential_times(workers: int, needed: int) -> None:
    """The R-th of V exponential times of mean 1: 1/V + 1/(V-1) + ... + 1/(V-R+1).

    The others leave off at once. From the second step on an idle worker may begin a shard that
    another has, but here each has its own at the same moment, and there is none left.
    """
    chance = random.Random(1)
    run = VirtualRun(
        places=[""] * workers,
        shards=workers,
        batches=1500,
        rule=parse(f"quorum:{needed}"),
        shard_s=lambda *_: chance.expovariate(1.0),
        leaves_off_s=lambda _: 0.0,
        patience=1e9,  # no copies: they would change what is drawn
    )
    run.play()
    expected = sum(1 / k for k in range(workers - needed + 1, workers + 1))
    assert run.now / 1500 == pytest.approx(expected, rel=0.03)


def test_under_async_the_coordinator_is_a_queue() -> None:
    """4 workers of 1 s and updates of 0.5 s: two updates a second, and no more."""
    run = VirtualRun(
        places=[""] * 4,
        shards=4,
        batches=10,
        rule=parse("async"),
        shard_s=lambda *_: 1.0,
        apply_s=lambda _: 0.5,
    )
    run.play()
    assert len(run.updates) == 40
    after = [update.at_s for update in run.updates]
    assert after[0] == 1.5
    assert all(b - a == 0.5 for a, b in pairwise(after))
    assert run.queued_s > 0


def test_a_worker_that_fails_is_waited_for_until_that_is_known() -> None:
    """Worker 1 fails half a second into step 1; 2 s later the other one takes its shard over."""
    run = VirtualRun(
        places=["a", "b"],
        shards=2,
        batches=4,
        rule=parse("sync"),
        shard_s=lambda *_: 1.0,
        failures=[Failure(1.5, worker=1, detected_s=0.2, away_s=2.0)],
    )
    run.play()
    # Both; worker 0 both shards of two steps; both again, from 3.7 on: in the last one.
    assert times(run)[:2] == [1.0, 3.0]
    assert len(run.updates) == 4
    assert run.workers == 2
    assert times(run)[3] == times(run)[2].expected + 1.0


def test_all_gone_for_good() -> None:
    run = VirtualRun(
        places=[""],
        shards=1,
        batches=4,
        rule=parse("sync"),
        shard_s=lambda *_: 1.0,
        failures=[Failure(1.5, worker=0, away_s=float("inf"))],
    )
    with expect_error(ProtocolError):
        run.play()


@pytest.mark.parametrize("rule", ["sync", "quorum:5", "async", "bounded:4"])
def test_it_makes_the_updates_of_the_simulator_that_checks_invariants(rule: str) -> None:
    def shard_s(worker: int, step: int, shard: int) -> float:
        return random.Random(f"{worker}/{step}/{shard}").lognormvariate(0.0, 0.5)

    made = parse(rule)
    shards = 1 if made.by_shard else 8
    judged = Simulation(
        shards=shards,
        steps=80 if made.by_shard else 10,
        rule=made,
        time_s=shard_s,
        leaves_off_s=0.01,
        most_open=8,
        home_shards=None,
        timeout_s=300.0,
    )
    judged.at(0.0, *(Joined(worker) for worker in range(8)))
    judged.run()
    run = VirtualRun(
        places=[""] * 8,
        shards=8,
        batches=10,
        rule=made,
        shard_s=shard_s,
        most_open_per_worker=1,
    )
    run.play()
    if made.by_shard:  # there the shards of a batch are at home in turn: other workers draw
        mean_s = fmean(judged.applied_at) / fmean(update.at_s for update in run.updates)
        assert mean_s == pytest.approx(1.0, rel=0.25)
        assert max(update.staleness for update in run.updates) <= made.staleness
    else:
        assert times(run) == judged.applied_at
    fates = run.tally.to_json()
    assert sum(fates["fresh"]) + sum(fates["stale"]) == sum(judged.fates["fresh"].values()) + sum(
        judged.fates["stale"].values()
    )
