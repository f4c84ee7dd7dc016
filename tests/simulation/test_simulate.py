"""``quorate.simulate``: small cases by hand, and the laws of large cases."""

from dataclasses import replace
from math import inf
from random import Random
from typing import Any

import pytest
from support.messages import expect_error

import quorate
from quorate.errors import SettingError
from quorate.simulation.checkpoint_interval import best_s, daly_s, goodput, young_s
from quorate.simulation.inputs import Checkpoints, Cores, Failures, Network, ShardTimes, Stragglers
from quorate.simulation.prediction import PARTS, Prediction

EXACT, ONE_S = ShardTimes(mean_s=2.0), ShardTimes(mean_s=1.0)
TWO = Cores(per_host=2)
WORKERS_FAIL: dict[str, Any] = {"coordinator_mtbf_h": inf, "detection_s": 0.0}


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


def test_uneven_shards_the_collective_and_long_shards_by_hand() -> None:
    told = quorate.simulate(3, shards=4, shard_times=EXACT, steps=20)
    assert told.step_s == pytest.approx(4.0)
    assert (told.shares["arithmetic"], told.shares["uneven"]) == pytest.approx((2 / 3, 1 / 3))
    # Of 4 hosts a quarter of 1 MB stays in place, twice: 1.5 MB at 10 MB/s.
    network = Network(engine="collective", gradient_bytes=1e6, bandwidth_bytes_per_s=1e7)
    told = quorate.simulate(4, shard_times=EXACT, network=network, per_host=1)
    assert told.step_s == pytest.approx(2.15)
    told = quorate.simulate(4, shard_times=ShardTimes(mean_s=1000.0), steps=5)
    assert told.step_s == pytest.approx(1000.0)  # waited for by default


MB = {"gradient_bytes": 1e6, "bandwidth_bytes_per_s": 1e7}  # 0.1 s over a link


@pytest.mark.parametrize(
    ("how", "seconds"),
    [
        ({}, 0.8 * 3 / 4 + 0.4 * 3 / 4),  # 8 sums in, 4 copies out, except for the own host's
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
        ({"servers": 4}, 0.2 * 3 / 4 + 0.1 * 3 / 4),  # a quarter of the above through each link
        ({"servers": 16}, 0.2 * 3 / 4 + 0.1 * 3 / 4),  # but a host sends no less than before
        ({"servers": 2}, 0.4 * 3 / 4 + 0.2 * 3 / 4),  # of the three quarters from other hosts
        ({"servers": 4, "bisection_bytes_per_s": 1e7}, 4 * 0.1 + 2 * 0.1),
        ({"servers": 4, "ray_bytes_per_s": 2e7}, 0.2 * 3 / 4 + 0.1 * 3 / 4 + 2 * 0.05),
        ({"servers": 4, "latency_s": 0.01}, 0.2 * 3 / 4 + 0.1 * 3 / 4 + 0.02),
    ],
)
@pytest.mark.parametrize("update", ["sync", "async"])
def test_links_to_servers_by_hand(how: dict[str, Any], seconds: float, update: str) -> None:
    """8 workers on 4 hosts: each shard waits for parameters, and until its gradient is there."""
    network = Network(engine="ray", **(MB | how))
    told = quorate.simulate(
        8, shard_times=EXACT, network=network, per_host=2, steps=10, update=update
    )
    batch_s = told.rows_per_update / told.examples_per_s * (1 if update == "sync" else 8)
    assert batch_s == pytest.approx(2.0 + seconds)
    assert told.shares["network"] == pytest.approx(seconds / batch_s)
    assert told.copies == 0


def test_backup_workers_end_the_wait_for_random_stragglers_and_not_for_long_shards() -> None:
    """With long shards the step is as long as the work: a worker has a shard for long."""

    def steps(**how: Any) -> list[float]:
        return [
            quorate.simulate(32, spares=spares, seed=3, steps=40, **how).step_s for spares in (0, 4)
        ]

    held_up = Stragglers(probability=0.05, factor=4.0)
    without, with_four = steps(update="quorum", stragglers=held_up)
    # An idle worker makes a copy 1.5 usual times into a shard: over at 2.5, and not at 4.
    assert without == pytest.approx(2.5)
    assert with_four == pytest.approx(1.0, abs=0.02)  # late workers leave off
    without, with_four = steps(update="sync", stragglers=held_up)
    assert without == pytest.approx(2.5)
    assert with_four == pytest.approx(2.5)
    without, with_four = steps(update="sync", shard_times=ShardTimes(work_spread=0.3))
    assert with_four == pytest.approx(without, rel=0.05)


def test_dropped_rows_and_staleness() -> None:
    spread = ShardTimes(spread=0.2)
    backup = quorate.simulate(16, update="quorum", spares=4, shard_times=spread, steps=40)
    assert (backup.shards, backup.rows_per_update) == (20, 16)
    assert backup.dropped == pytest.approx(4 / 20, abs=0.02)
    free = quorate.simulate(16, update="async", shard_times=spread, steps=60)
    assert free.staleness_mean == pytest.approx(15.0, abs=1.0)
    bounded = quorate.simulate(16, update="bounded:3", shard_times=spread, steps=20)
    assert bounded.staleness_max == 3
    assert bounded.running_examples_per_s < 0.5 * free.running_examples_per_s


def test_a_failure_of_a_run_without_copies_by_hand() -> None:
    """4 workers, a shard of 1 s each: without one worker a step takes 2 s, at half of the speed.

    Workers are away for 36 s of each 36,036 s. A partly computed shard is computed again.
    """
    failures = Failures(worker_mtbf_h=10.0, restart_s=36.0, **WORKERS_FAIL)
    told = quorate.simulate(4, failures=failures, steps=50)
    mean = 4 * 36 / 36036
    assert told.failures_per_day == pytest.approx(9.6)
    assert told.goodput == pytest.approx(1 - mean / 2, abs=0.1 * mean)
    assert told.run_mtbf_h == inf
    spared = quorate.simulate(4, spares=1, failures=failures, steps=50)
    assert spared.goodput > 1 - 0.1 * mean  # without one worker there are still four


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


def test_more_workers_than_cores_bring_nothing() -> None:
    """4 shards of 1 s take 4, 2 and 2 s on two cores."""
    steps = {
        n: quorate.simulate(n, shards=4, shard_times=ONE_S, cores=TWO, steps=20).step_s
        for n in (1, 2, 4)
    }
    assert steps == {1: pytest.approx(4.0), 2: pytest.approx(2.0), 4: pytest.approx(2.0)}
    # Three at 2/3 of a core for 1.5 s; the fourth shard has a full core.
    three = quorate.simulate(3, shards=4, shard_times=ONE_S, cores=TWO, steps=20)
    assert three.step_s == pytest.approx(2.5)


def test_under_async_updates_take_from_workers_where_cores_are_short() -> None:
    """Share two cores among all work: 1 s a shard and 0.5 s for its update."""
    how: dict[str, Any] = {"update": "async", "shard_times": ONE_S, "steps": 200}
    told = quorate.simulate(4, update_s=0.5, cores=TWO, **how)
    assert told.running_examples_per_s == pytest.approx(2 / 1.5, rel=0.01)
    # With cores enough the single coordinator is the limit.
    enough = quorate.simulate(4, update_s=0.5, **how)
    assert enough.running_examples_per_s == pytest.approx(2.0, rel=0.01)
    # A straggler holds no core while waiting.
    slow = quorate.simulate(2, stragglers=Stragglers(steady=[1.0, 5.0]), **how)
    assert slow.running_examples_per_s == pytest.approx(1.2, rel=0.02)


@pytest.mark.parametrize(("workers", "goodput"), [(1, 0.7), (2, 0.49 + 0.42 / 2)])
def test_workers_that_are_away_for_three_of_ten_seconds(workers: int, goodput: float) -> None:
    """Two workers, each taking an absent one's shards: 0.49 both, 0.42 one at half the speed."""
    failures = Failures(worker_mtbf_h=7 / 3600, restart_s=3.0, **WORKERS_FAIL)
    times = ShardTimes(mean_s=0.001)
    told = quorate.simulate(workers, shard_times=times, failures=failures, steps=20)
    assert told.goodput == pytest.approx(goodput, rel=0.01)


@pytest.mark.parametrize(
    ("how", "vectors"),
    [
        ({}, 4),
        ({"per_host": 3}, 5),  # shards 0 to 2, 3 to 5, 6 and 7: 2, 2 and 1 subtrees
        ({"per_host": 8}, 8),  # in the coordinator's memory
        ({"update": "quorum:7"}, 7),  # the seven are unknown, so each travels alone
        ({"update": "async"}, 1),
    ],
)
def test_hosts_of_ray_add_up_what_their_workers_have(how: dict[str, Any], vectors: int) -> None:
    network = Network(engine="ray", **MB)
    told = quorate.simulate(8, **{"network": network, "per_host": 2, "steps": 5} | how)
    assert told.vectors == vectors


def test_what_fails_all_the_time_gets_nowhere() -> None:
    failures, saving = Failures(worker_mtbf_h=1e-300), Checkpoints(stall_s=1e9)
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
    ("what", "wrong"),
    [
        (quorate.simulate, {"workers": 0}),
        (quorate.simulate, {"spares": -1}),
        (quorate.simulate, {"update": "quorum:9"}),
        (quorate.simulate, {"update_s": float("nan")}),
        (quorate.simulate, {"rows_per_shard": 0}),
        (quorate.simulate, {"shards": 3_000_000}),
        (quorate.simulate, {"steps": 1}),
        (quorate.simulate, {"network": Network(engine="collective"), "update": "async"}),
        (quorate.simulate, {"network": Network(servers=2)}),
        (ShardTimes, {"mean_s": 0.0}),
        (ShardTimes, {"measured_s": (1.0, -1.0)}),
        (Stragglers, {"probability": 1.5}),
        (Failures, {"worker_mtbf_h": 0}),
        (Network, {"engine": "pigeons"}),
        (Network, {"servers": -1}),
        (Cores, {"per_host": 0}),
        (Checkpoints, {"every_s": 0}),
    ],
)
def test_what_cannot_be(what: Any, wrong: dict[str, Any]) -> None:
    with expect_error(SettingError):
        what(**{"workers": 4} | wrong if what is quorate.simulate else wrong)


# --- how often to save ----------------------------------------------------------------------------

STALL_S, RESTART_S = 10.0, 60.0


def played(every_s: float, mtbf_s: float, failures: int, stall_s: float = STALL_S) -> float:
    """Return the share of time with work in a run with failures drawn in sequence."""
    chance = Random(0)
    now, worked_s, begins_at = 0.0, 0.0, 0.0
    for _ in range(failures):
        now += chance.expovariate(1 / mtbf_s)
        if now > begins_at:
            worked_s += (now - begins_at) // (every_s + stall_s) * every_s
        begins_at = now + RESTART_S  # a failure during a restart restarts again
    return worked_s / now


@pytest.mark.parametrize("mtbf_h", [0.5, 30.0, 1000.0])
def test_the_closed_form_is_what_runs_that_are_played_have(mtbf_h: float) -> None:
    """Young's and Daly's are within 5 percent of the optimum: of 10 s a checkpoint."""
    mtbf_s = mtbf_h * 3600
    optimum_s = best_s(STALL_S, mtbf_s)
    for times in (0.3, 1.0, 3.0):
        share = played(times * optimum_s, mtbf_s, 20_000)
        formula = goodput(times * optimum_s, STALL_S, mtbf_s, RESTART_S)
        assert 1 - share == pytest.approx(1 - formula, rel=0.03)
    grid = [optimum_s * 1.01**n for n in range(-40, 41)]
    of_grid = {every_s: goodput(every_s, STALL_S, mtbf_s, RESTART_S) for every_s in grid}
    assert max(of_grid, key=lambda every_s: of_grid[every_s]) == optimum_s  # the middle of the grid
    assert daly_s(STALL_S, mtbf_s) == pytest.approx(optimum_s, rel=0.001)
    assert young_s(STALL_S, mtbf_s) == pytest.approx(optimum_s, rel=0.05)
    # Played, the optimum is so flat that its place is noise; the cost of a rule is not.
    best = max(played(every_s, mtbf_s, 2_000) for every_s in grid[::10])
    for rule_s in (young_s(STALL_S, mtbf_s), daly_s(STALL_S, mtbf_s)):
        assert 1 - played(rule_s, mtbf_s, 2_000) == pytest.approx(1 - best, rel=0.05)


def test_where_young_is_not_and_the_ends() -> None:
    """A checkpoint of a minute and a failure each half hour: 9% too long; Daly's is not."""
    optimum_s = best_s(60.0, 1800.0)
    assert young_s(60.0, 1800.0) / optimum_s == pytest.approx(1.09, abs=0.01)
    assert daly_s(60.0, 1800.0) == pytest.approx(optimum_s, rel=0.003)
    assert best_s(10.0, inf) == daly_s(10.0, inf) == inf
    assert goodput(inf, 10.0, inf, 60.0) == 1.0
    assert goodput(90.0, 10.0, inf, 60.0) == 0.9
    assert best_s(0.0, 3600.0) == pytest.approx(0.0, abs=1e-6)
    assert goodput(0.0, 0.0, 3600.0, 0.0) == 1.0
    assert goodput(1e9, 10.0, 3600.0, 0.0) == 0.0
    assert daly_s(100.0, 50.0) == 50.0
