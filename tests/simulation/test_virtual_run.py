"""Virtual runs and shared cores: by hand, and against closed forms."""

import math
import random
from typing import Any

import pytest
from support.messages import expect_error

from quorate.coordination.rules import parse
from quorate.errors import ProtocolError
from quorate.simulation.inputs import Cores
from quorate.simulation.models import COORDINATOR, SharedCores
from quorate.simulation.virtual_run import VirtualRun, WorkerFailure


def played(workers: int, batches: int, rule: str = "sync", **options: Any) -> VirtualRun:
    """Play a run with a shard for each worker, of 1 s."""
    run = VirtualRun(**{"places": [""] * workers, "shards": workers, "batches": batches,
                        "rule": parse(rule), "shard_s": lambda *_: 1.0} | options)  # fmt: skip
    run.play()
    return run


def times(run: VirtualRun) -> list[Any]:
    return [pytest.approx(update.at_s) for update in run.updates]


@pytest.mark.parametrize(("workers", "needed"), [(8, 6), (20, 18)])
def test_a_quorum_takes_the_order_statistic_of_exponential_times(workers: int, needed: int) -> None:
    """The R-th of V exponential times of mean 1: 1/V + 1/(V-1) + ... + 1/(V-R+1).

    All late workers leave off at once. From the second step on an idle worker may begin a shard of
    another worker, but here each worker gets a shard at the same moment, and no shard is left.
    """
    chance = random.Random(1)
    run = played(workers, 1000, f"quorum:{needed}", shard_s=lambda *_: chance.expovariate(1.0),
                 leaves_off_s=lambda _: 0.0, patience=1e9)  # fmt: skip
    expected = sum(1 / k for k in range(workers - needed + 1, workers + 1))
    assert run.now / 1000 == pytest.approx(expected, rel=0.03)


def test_a_worker_that_fails_is_waited_for_until_that_is_known() -> None:
    """Worker 1 fails half a second into step 1; 2 s later worker 0 takes over the shard."""
    run = played(2, 4, failures=[WorkerFailure(1.5, worker=1, detected_s=0.2, away_s=2.0)])
    # Both; worker 0 both shards of two steps; both again, from 3.7 on: in the last step.
    assert times(run)[:2] == [1.0, 3.0]
    assert len(run.updates) == 4
    assert None not in (run.coordinator.usual_shard_s(0), run.coordinator.usual_shard_s(1))
    assert times(run)[3] == times(run)[2].expected + 1.0
    with expect_error(ProtocolError):  # gone for good
        played(1, 4, failures=[WorkerFailure(1.5, worker=0, away_s=float("inf"))])


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["quorum:9900", "bounded:20000"])
def test_ten_thousand_workers(rule: str) -> None:
    """A single straggler among them: copied, dropped, late."""
    run = played(10_000, 2, rule, shard_s=lambda worker, *_: 1.0 + 99 * (worker == 77))
    made = parse(rule)
    assert len(run.updates) == (20_000 if made.by_shard else 2)
    fates = run.coordinator.tally.to_json()
    needed = 2 * made.needed(10_000)
    assert sum(fates["fresh"]) + sum(fates["stale"]) == (20_000 if made.by_shard else needed)
    assert run.now < 6.0 or made.by_shard


# --- shared cores ---------------------------------------------------------------------------------


def ends(cores: SharedCores) -> list[tuple[Any, int]]:
    found = []
    while cores.next_at < math.inf:
        at, job = cores.end()
        found.append((pytest.approx(at), job))
    return found


def begun(places: list[int], jobs: dict[int, float], **how: Any) -> SharedCores:
    beside = how.pop("beside", 0)
    cores = SharedCores(places, Cores(**({"per_host": 1} | how)), beside)
    for job, seconds in jobs.items():
        cores.begin(0.0, job, seconds)
    return cores


def test_jobs_share_cores_by_hand() -> None:
    """Three jobs of 1, 2 and 3 s on two cores: at 2/3 of a core, then each on a full core."""
    cores = begun([0] * 3, {0: 1.0, 1: 2.0, 2: 3.0}, per_host=2)
    assert ends(cores) == [(1.5, 0), (2.5, 1), (3.5, 2)]
    # Hosts do not share, and the coordinator is on the first.
    apart = begun([0, 1], {0: 1.0, 1: 1.0, COORDINATOR: 1.0})
    assert ends(apart) == [(1.0, 1), (2.0, COORDINATOR), (2.0, 0)]
    # A job that leaves off gives its share to the remaining jobs.
    cores = begun([0, 0], {0: 1.0, 1: 1.0})
    for _ in range(2):
        cores.leave_off(1.0, 0)
    assert ends(cores) == [(1.5, 1)]


@pytest.mark.parametrize(
    ("how", "alone_s", "both_s"),
    [
        ({}, 1.0, 1.0),
        ({"threads": 2}, 1.0, 2.0),
        ({"crowding": 1.2}, 1.0, 1.2),
        ({"per_host": 1}, 1.0, 2.0),
        ({"beside": 1}, 1.0, 1.5),
    ],
)
def test_threads_crowding_and_jobs_beside(
    how: dict[str, Any], alone_s: float, both_s: float
) -> None:
    how = {"per_host": 2} | how
    assert ends(begun([0] * 2, {0: 1.0}, **how)) == [(alone_s, 0)]
    assert ends(begun([0] * 2, {0: 1.0, 1: 1.0}, **how))[-1][0] == both_s
