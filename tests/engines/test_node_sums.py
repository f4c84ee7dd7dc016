"""Sums of the results of a node's workers: added results, waiting results, and no lost results."""

from typing import Any

import pytest

pytest.importorskip("ray", reason="quorate's extra ray is not installed")

from quorate.engines.processes.worker_messages import ComputeShards
from quorate.engines.ray.node_sums import NodeSums, WorkerResult


def result(worker: Any, shard: int) -> WorkerResult:
    order = ComputeShards(1, 0, 0, shard, [shard], None, (0, 3), leaves=4)
    return WorkerResult(worker, order, None, slot=0, computed_s=1.0)  # type: ignore[arg-type]


class Node:
    """The orders of workers, a shard each, and the sums of their results."""

    def __init__(self, **shards: int) -> None:
        self.results = {worker: result(worker, shard) for worker, shard in shards.items()}
        self.unanswered = {*shards}
        self.sums = NodeSums(lambda: [self.results[worker].order for worker in self.unanswered])

    def put(self, worker: str) -> bool:
        self.unanswered.remove(worker)
        return self.sums.put(self.results[worker])

    def shards(self) -> list[list[int]]:
        return [[each.order.shard for each in results] for results in self.sums.ready()]


@pytest.fixture(autouse=True)
def _results_wait_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quorate.engines.ray.node_sums.NODE_SUM_S", 1e9)
    monkeypatch.setattr("quorate.engines.ray.node_sums.PATIENCE", 1e9)


def test_a_result_waits_for_the_rest_of_its_subtree() -> None:
    node = Node(a=0, b=1, c=3)
    assert node.put("a")
    assert node.shards() == []
    assert node.put("c")
    assert node.shards() == [[3]]  # no worker of the node computes the sibling
    assert node.put("b")
    assert node.shards() == [[0, 1]]
    assert node.sums.due() == float("inf")


@pytest.mark.parametrize("who", ["a", "b"])
def test_a_copy_that_is_lost_takes_no_result_along(who: str) -> None:
    """Two workers compute shard 0: the first has a result, and either worker ends."""
    node = Node(a=0, b=0, c=1)
    assert node.put("a")
    if who == "b":
        assert not node.put("b")  # second: the result goes alone
    node.sums.hurry(who)  # type: ignore[arg-type]
    assert node.shards() == ([[0]] if who == "a" else [])
    assert node.put("c")
    assert node.shards() == ([[1]] if who == "a" else [[0, 1]])  # nobody waits for a late copy
    assert who == "b" or not node.put("b")
