"""``quorate.simulate``: small cases by hand, and what must be so of large ones."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random
from typing import Any

import pytest
from support.messages import expect_error

import quorate
from quorate.coordination.rules import parse
from quorate.errors import SettingError
from quorate.simulation.inputs import Checkpoints, Cores, Failures, Network, ShardTimes, Stragglers
from quorate.simulation.prediction import PARTS, Prediction
from quorate.simulation.virtual_run import Failure, VirtualRun

EXACT = ShardTimes(mean_s=2.0)


def test_by_hand() -> None:
    """4 workers on two hosts, 2 s a shard, 0.5 s of update; 2 sums over the link, 1 copy back."""
    told = quorate.simulate(
        4,
        shard_times=EXACT,
        rows_per_shard=8,
        per_host=2,
        update_s=0.5,
        network=Network(gradient_bytes=1e6, bandwidth_bytes_per_s=1e7, latency_s=0.05),
        dollars_per_worker_h=3.0,
    )
    assert told.step_s == pytest.approx(2.0 + 0.5 + 0.2 + 0.1 + 0.1)
    assert told.step_p99_s == pytest.approx(2.9)
    assert told.examples_per_s == told.running_examples_per_s == pytest.approx(4 * 8 / 2.9)
    assert told.efficiency == pytest.approx((32 / 2.9) / (4 * 32 / 8.5))
    assert told.dollars_per_million == pytest.approx(12.0 / 3600 * 2.9 / 32 * 1e6)
    assert (told.goodput, told.dropped, told.staleness_max) == (1.0, 0.0, 0)
    assert told.shares == {
        "arithmetic": pytest.approx(2 / 2.9),
        "cores": 0.0,
        "uneven": 0.0,
        "stragglers": pytest.approx(0.0, abs=1e-9),
        "updates": pytest.approx(0.5 / 2.9),
        "network": pytest.approx(0.4 / 2.9),
        "checkpoints": 0.0,
        "failures": 0.0,
    }


def test_shards_that_cannot_be_dealt_evenly() -> None:
    told = quorate.simulate(3, shards=4, shard_times=EXACT)
    assert told.step_s == pytest.approx(4.0)
    assert told.shares["arithmetic"] == pytest.approx(2 / 3)
    assert told.shares["uneven"] == pytest.approx(1 / 3)


def test_the_collective_by_hand() -> None:
    """Of 4 hosts a quarter of 1 MB stays where it is, twice: 1.5 MB at 10 MB/s."""
    network = Network(engine="collective", gradient_bytes=1e6, bandwidth_bytes_per_s=1e7)
    told = quorate.simulate(4, shard_times=EXACT, network=network, per_host=1)
    assert told.step_s == pytest.approx(2.15)


def test_hosts_of_ray_add_up_what_their_workers_have() -> None:
    """8 workers on 4 hosts: 4 vectors in the place of 8, three quarters of each over the link."""

    def told(**how: Any) -> Prediction:
        network = Network(engine="ray", gradient_bytes=1e6, bandwidth_bytes_per_s=1e7)
        return quorate.simulate(
            8, **{"shard_times": EXACT, "network": network, "per_host": 2} | how
        )

    assert (told().vectors, told().holders) == (4, 8)
    assert told().step_s == pytest.approx(2.0 + 4 * 0.075 + 4 * 0.075)  # in, and copies out
    assert told(per_host=3).vectors == 5  # shards 0 to 2, 3 to 5, 6 and 7: 2, 2 and 1 subtrees
    assert told(per_host=8).vectors == 8  # in the coordinator's memory
    assert told(update="quorum:7", shards=16).vectors >= 7  # of any, so each travels alone
    assert told(update="async").vectors == 1
    plain = Network(gradient_bytes=1e6, bandwidth_bytes_per_s=1e7)
    assert told(network=plain).vectors == 8


MB = {"gradient_bytes": 1e6, "bandwidth_bytes_per_s": 1e7}  # 0.1 s over a link


@pytest.mark.parametrize(
    ("how", "seconds"),
    [
        ({}, 0.8 * 3 / 4 + 0.4 * 3 / 4),  # 8 sums in, 4 copies out, all but those of its own host
        ({"bisection_bytes_per_s": 2.5e6}, 4 * 0.4 + 2 * 0.4),  # half of both, at 0.4 s each
        ({"ray_bytes_per_s": 1e7}, 2 * (0.8 + 0.4) * 3 / 4),  # as long again
        ({"ray_bytes_per_s": 1e7, "engine": "processes"}, (0.8 + 0.4) * 3 / 4),
        ({"vector_s": 0.01}, 0.8 * 3 / 4 + 0.4 * 3 / 4 + 8 * 0.01),
        ({"vector_s": 0.01, "servers": 2}, 8 * 0.01 / 2),  # links are for workers to wait for
        ({"engine": "collective"}, 2 * 0.1 * 3 / 4),
        ({"engine": "collective", "bisection_bytes_per_s": 2e6}, 2 * 0.5),  # 4 MB/4, twice
    ],
)
def test_exchanges_by_hand(how: dict[str, Any], seconds: float) -> None:
    """8 workers on 4 hosts, 1 MB of parameters, links of 10 MB/s."""
    network = Network(**({"engine": "ray"} | MB | how))
    assert network.exchange_s(8, 4) == pytest.approx(seconds)
    of_all_s = how.get("vector_s", 0.0) * 8 / how.get("servers", 1)
    assert network.exchange_s(8, 1) == pytest.approx(of_all_s)  # no link


@pytest.mark.parametrize(
    ("how", "seconds"),
    [
        ({"servers": 4}, 0.2 * 3 / 4 + 0.1 * 3 / 4),  # a quarter of that through each link
        ({"servers": 16}, 0.2 * 3 / 4 + 0.1 * 3 / 4),  # but what a host sends does not get less
        ({"servers": 2}, 0.4 * 3 / 4 + 0.2 * 3 / 4),  # of the three quarters that come from others
        ({"servers": 4, "bisection_bytes_per_s": 1e7}, 4 * 0.1 + 2 * 0.1),
        ({"servers": 4, "ray_bytes_per_s": 2e7}, 0.2 * 3 / 4 + 0.1 * 3 / 4 + 2 * 0.05),
        ({"servers": 4, "latency_s": 0.01}, 0.2 * 3 / 4 + 0.1 * 3 / 4 + 0.02),
    ],
)
def test_links_to_servers_by_hand(how: dict[str, Any], seconds: float) -> None:
    """8 workers on 4 hosts: each shard waits for parameters, and until its gradient is there."""
    network = Network(engine="ray", **(MB | how))
    told = quorate.simulate(8, shard_times=EXACT, network=network, per_host=2, steps=10)
    assert told.step_s == pytest.approx(2.0 + seconds)
    assert told.shares["network"] == pytest.approx(seconds / told.step_s)
    assert told.copies == 0


def test_gradients_travel_while_the_next_shard_is_computed() -> None:
    """2 hosts, a server each, 2 shards per worker: half of 1 MB in, then out, the first meanwhile.

    Both gradients are half of 0.1 s on their way, and so are the parameters, once.
    """
    network = Network(engine="ray", servers=2, **MB)
    told = quorate.simulate(2, shards=4, shard_times=EXACT, network=network, per_host=1, steps=10)
    assert told.step_s == pytest.approx(0.05 + 2 * 2.0 + 0.05)


@pytest.mark.parametrize(("shard_s", "copies", "step_s"), [(1.0, True, 2.0), (8.0, False, 12.0)])
def test_who_is_beside_the_only_server_takes_over_from_others(
    shard_s: float, copies: bool, step_s: float
) -> None:
    """Elsewhere a shard takes 4 s longer. Beside the server 2 of 1 s are done before: one's copy.

    The other worker is told to leave off, and does when the parameters are there.
    """
    network = Network(engine="ray", servers=1, gradient_bytes=2e7, bandwidth_bytes_per_s=1e7)
    times = ShardTimes(mean_s=shard_s)
    told = quorate.simulate(2, shard_times=times, network=network, per_host=1, steps=30)
    assert told.step_s == pytest.approx(step_s)
    assert (told.copies > 0) == copies


def test_backup_workers_end_the_wait_for_random_stragglers_and_not_for_long_shards() -> None:
    """With long shards the step is as long as the work: whoever gets a shard, has it for long."""

    def steps(**how: Any) -> list[float]:
        return [
            quorate.simulate(32, spares=spares, seed=3, steps=200, **how).step_s
            for spares in (0, 4)
        ]

    held_up = Stragglers(probability=0.05, factor=4.0)
    without, with_four = steps(update="quorum", stragglers=held_up)
    # Whoever is done makes a copy 1.5 usual times into a shard: over at 2.5, and not at 4.
    assert without == pytest.approx(2.5)
    assert with_four == pytest.approx(1.01)  # those that were late leave off
    without, with_four = steps(update="sync", stragglers=held_up)
    assert without == pytest.approx(2.5)
    assert with_four == pytest.approx(2.5)
    without, with_four = steps(update="sync", shard_times=ShardTimes(work_spread=0.3))
    assert with_four == pytest.approx(without, rel=0.05)


def test_steady_stragglers_are_worked_around_by_more_shards_than_workers() -> None:
    slow = Stragglers(slow_workers=0.125, slow_factor=2.0)
    one_each = quorate.simulate(8, stragglers=slow)
    four_each = quorate.simulate(8, shards=32, stragglers=slow)
    assert one_each.step_s == pytest.approx(2.0, rel=0.01)
    assert four_each.step_s / 4 < 1.3
    # One spare replaces the slow one, for good, where the late are dropped.
    spared = quorate.simulate(8, update="quorum", spares=1, stragglers=slow)
    assert spared.step_s == pytest.approx(1.0)


def test_dropped_rows_and_staleness() -> None:
    spread = ShardTimes(spread=0.2)
    backup = quorate.simulate(16, update="quorum", spares=4, shard_times=spread)
    assert (backup.shards, backup.rows_per_update) == (20, 16)
    assert backup.dropped == pytest.approx(4 / 20, abs=0.02)
    free = quorate.simulate(16, update="async", shard_times=spread)
    assert free.staleness_mean == pytest.approx(15.0, abs=1.0)
    bounded = quorate.simulate(16, update="bounded:3", shard_times=spread, steps=20)
    assert bounded.staleness_max == 3
    assert bounded.running_examples_per_s < 0.5 * free.running_examples_per_s


def test_a_failure_of_a_run_without_copies_by_hand() -> None:
    """4 workers, a shard of 1 s each: with one away a step takes 2 s, so half of the speed is left.

    They are away for 36 s of each 36,036 s. What was computed of a shard is done again.
    """
    failures = Failures(worker_mtbf_h=10.0, coordinator_mtbf_h=inf, detection_s=0.0, restart_s=36.0)
    told = quorate.simulate(4, failures=failures, steps=50)
    mean = 4 * 36 / 36036
    assert told.failures_per_day == pytest.approx(9.6)
    assert told.goodput == pytest.approx(1 - mean / 2, abs=0.1 * mean)
    assert told.run_mtbf_h == inf
    spared = quorate.simulate(4, spares=1, failures=failures, steps=50)
    assert spared.goodput > 1 - 0.1 * mean  # with one away there are four


def test_the_same_with_failures_that_are_played_all_along() -> None:
    """Rare failures are put together from what one costs. Against a run in which they happen."""
    failures = Failures(worker_mtbf_h=0.5, coordinator_mtbf_h=inf, detection_s=2.0, restart_s=20.0)
    told = quorate.simulate(8, failures=failures, steps=50)

    chance, at_s, lost = Random(0), 0.0, []
    while at_s < 12_000:
        at_s += chance.expovariate(8 / 1800)
        lost.append(Failure(at_s, chance.randrange(8), 2.0, 20.0))
    run = VirtualRun(
        places=[""] * 8,
        shards=8,
        batches=3_000,
        rule=parse("sync"),
        shard_s=lambda *_: 1.0,
        failures=lost,
    )
    run.play()
    assert told.goodput == pytest.approx(3_000 / run.now, rel=0.03)


def test_ranks_of_a_collective_begin_again_together() -> None:
    failures = Failures(worker_mtbf_h=1000.0, coordinator_mtbf_h=inf, run_restart_s=300.0)
    how: dict[str, Any] = {
        "failures": failures,
        "checkpoints": Checkpoints(stall_s=10.0),
        "steps": 8,
    }
    ranks = quorate.simulate(256, network=Network(engine="collective"), **how)
    others = quorate.simulate(256, **how)
    assert ranks.run_mtbf_h == pytest.approx(1000 / 256)
    assert others.run_mtbf_h == inf
    assert ranks.goodput < others.goodput
    assert ranks.save_every_s == pytest.approx(ranks.daly_s, rel=0.01)
    assert ranks.young_s == pytest.approx((2 * 10 * 1000 / 256 * 3600) ** 0.5)


def test_what_the_time_goes_into_adds_up() -> None:
    for update in ("sync", "quorum", "async", "bounded:4"):
        told = quorate.simulate(
            12,
            update=update,
            shard_times=ShardTimes(spread=0.3),
            update_s=0.05,
            failures=Failures(worker_mtbf_h=20.0),
            checkpoints=Checkpoints(stall_s=5.0),
            steps=20,
        )
        assert told.shares.keys() == set(PARTS)
        assert sum(told.shares.values()) == pytest.approx(1.0)
        assert min(told.shares.values()) >= 0.0
        assert isinstance(told, Prediction)


def test_shards_that_take_longer_than_workers_are_waited_for_by_default() -> None:
    told = quorate.simulate(4, shard_times=ShardTimes(mean_s=1000.0), steps=5)
    assert told.step_s == pytest.approx(1000.0)


@pytest.mark.parametrize("mtbf_h", [1e-300, 1e-3])
def test_what_fails_all_the_time_gets_nowhere(mtbf_h: float) -> None:
    failures, saving = Failures(worker_mtbf_h=mtbf_h), Checkpoints(stall_s=1e9)
    told = quorate.simulate(2, failures=failures, checkpoints=saving, steps=4)
    assert (told.goodput, told.examples_per_s, told.dollars_per_million) == (0.0, 0.0, 0.0)
    how: dict[str, Any] = {"failures": failures, "checkpoints": saving, "steps": 4}
    assert quorate.simulate(2, dollars_per_worker_h=1.0, **how).dollars_per_million == inf


def test_the_same_seed_is_the_same_prediction() -> None:
    how: dict[str, Any] = {"shard_times": ShardTimes(spread=0.3), "steps": 10}
    assert quorate.simulate(8, seed=1, **how) == quorate.simulate(8, seed=1, **how)
    assert quorate.simulate(8, seed=1, **how) != quorate.simulate(8, seed=2, **how)
    assert replace(quorate.simulate(8, **how)).to_json()["run_mtbf_h"] is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": 0},
        {"spares": -1},
        {"update": "quorum:9"},
        {"update": "sometimes"},
        {"update_s": -1.0},
        {"update_s": float("nan")},
        {"rows_per_shard": 0},
        {"update_s": inf},
        {"shards": 3_000_000},
        {"steps": 1},
        {"network": Network(engine="collective"), "update": "async"},
        {"network": Network(servers=2)},
        {"network": Network(engine="ray", servers=2), "update": "async"},
    ],
)
def test_what_cannot_be(wrong: dict[str, Any]) -> None:
    with expect_error(SettingError):
        quorate.simulate(**{"workers": 4, **wrong})


@pytest.mark.parametrize(
    ("group", "wrong"),
    [
        (ShardTimes, {"mean_s": 0.0}),
        (ShardTimes, {"measured_s": (1.0, -1.0)}),
        (Stragglers, {"probability": 1.5}),
        (Stragglers, {"slow_factor": 0.5}),
        (Failures, {"worker_mtbf_h": 0}),
        (Failures, {"restart_s": -1}),
        (Network, {"engine": "pigeons"}),
        (Network, {"servers": -1}),
        (Cores, {"per_host": 0}),
        (Cores, {"crowding": 0.9}),
        (Checkpoints, {"every_s": 0}),
    ],
)
def test_groups_check_themselves(group: Any, wrong: dict[str, Any]) -> None:
    with expect_error(SettingError):
        group(**wrong)
