"""Sums of the results of a node's workers: added results, waiting results, and no lost results."""

from typing import Any

import pytest

pytest.importorskip("ray", reason="quorate's extra ray is not installed")

from quorate.engines.processes.worker_messages import ComputeShards
from quorate.engines.ray.relay_actor import NodeSums, WorkerResult


def result(worker: Any, shard: int) -> WorkerResult:
    order = ComputeShards(1, 0, 0, shard, [shard], None, (0, 3), leaves=4)
    return WorkerResult(worker, order, None, slot=0)  # type: ignore[arg-type]


def shards(sums: NodeSums) -> list[list[int]]:
    return [[each.order.shard for each in results] for results in sums.ready()]


def waiting(*orders: tuple[str, int]) -> NodeSums:
    sums = NodeSums()
    for worker, shard in orders:
        sums.ordered(worker, result(worker, shard).order)  # type: ignore[arg-type]
    return sums


def test_a_result_waits_for_the_rest_of_its_subtree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quorate.engines.ray.relay_actor.PATIENCE", 1e9)
    sums = waiting(("a", 0), ("b", 1), ("c", 3))
    assert sums.done(result("a", 0))
    assert shards(sums) == []
    assert sums.done(result("c", 3))
    assert shards(sums) == [[3]]  # no worker of the node computes the sibling
    assert sums.done(result("b", 1))
    assert shards(sums) == [[0, 1]]
    assert sums.due() == float("inf")


@pytest.mark.parametrize("who", ["a", "b"])
def test_a_copy_that_is_lost_takes_no_result_along(
    who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers compute shard 0: the first has a result, and either worker ends."""
    monkeypatch.setattr("quorate.engines.ray.relay_actor.PATIENCE", 1e9)
    sums = waiting(("a", 0), ("b", 0), ("c", 1))
    assert sums.done(result("a", 0))
    assert not sums.done(result("b", 0))  # second: the result goes alone
    sums.lost(who, result(who, 0).order)  # type: ignore[arg-type]
    sums.hurry(who)  # type: ignore[arg-type]
    assert shards(sums) == ([[0]] if who == "a" else [])
    assert sums.done(result("c", 1))
    assert shards(sums) == ([[1]] if who == "a" else [[0, 1]])
