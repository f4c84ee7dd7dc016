"""Results of one node are added there, and fetched as one: which wait for which, and the bits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from quorate.coordination.tree import tree_sum
from quorate.replica.flat import Layout
from quorate.replica.model import bind, trainable
from quorate.transports.processes.arena import Arena
from quorate.transports.ray.adding import Adder
from quorate.transports.ray.node_sums import NodeSums, Where

HERE, THERE = Where("a", 1, 7), Where("b", 1, 7)
Done = Callable[[Where, int], threading.Thread]


class Sums:
    """Sums whose results are worth waiting for, and what each call returned."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sums = NodeSums[str](lambda: self.now + time.monotonic() - self._began)
        self._began = time.monotonic()
        self.returned: dict[int, dict[int, str]] = {}

    def done(self, where: Where, shard: int, worker: object = "a") -> threading.Thread:
        """Call it in a thread, and return that once the result waits or the call has returned."""

        def call() -> None:
            self.returned[shard] = self.sums.done(where, shard, f"result {shard}", worker)

        thread = threading.Thread(target=call)
        thread.start()
        until = time.monotonic() + 60
        while thread.is_alive() and not self.waits(where, shard):
            assert time.monotonic() < until
            time.sleep(0.001)
        return thread

    def waits(self, where: Where, shard: int) -> bool:
        step = self.sums._steps.get(where)
        return step is not None and shard in step.waiting


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Sums:
    monkeypatch.setattr("quorate.transports.ray.node_sums.MOST_S", 60.0)
    return Sums()


def of(*shards: int) -> dict[int, str]:
    return {shard: f"result {shard}" for shard in shards}


def test_the_last_of_a_subtree_has_all_of_it(sums: Sums) -> None:
    for shard in (0, 1, 2):
        sums.sums.ordered(HERE, shard, 4, "a")
    sums.sums.ordered(THERE, 3, 4, "a")
    sums.now = 100.0
    first = sums.done(HERE, 1)
    assert sums.sums.done(HERE, 2, "result 2", "a") == of(2)  # its neighbour is on another node
    assert sums.sums.done(HERE, 0, "result 0", "a") == of(0, 1)
    first.join()
    assert sums.returned[1] == {}
    assert sums.sums.done(THERE, 3, "result 3", "a") == of(3)
    assert not sums.sums._steps


def test_shards_beyond_a_power_of_two_are_a_subtree_of_what_there_is(sums: Sums) -> None:
    for shard in (4, 5, 6):
        sums.sums.ordered(HERE, shard, 7, "a")
    sums.now = 100.0
    threads = [sums.done(HERE, 6), sums.done(HERE, 4)]
    assert sums.sums.done(HERE, 5, "result 5", "a") == of(4, 5, 6)
    for thread in threads:
        thread.join()


def test_nobody_waits_for_a_shard_that_is_lost(sums: Sums) -> None:
    for shard in (0, 1):
        sums.sums.ordered(HERE, shard, 2, "a")
    sums.now = 100.0
    waiting = sums.done(HERE, 0)
    sums.sums.lost(HERE, 1, "a")
    waiting.join()
    assert sums.returned[0] == of(0)
    assert not sums.sums._steps


def test_nobody_waits_for_a_straggler_longer_than_half_its_own_time(sums: Sums) -> None:
    for shard in range(4):
        sums.sums.ordered(HERE, shard, 4, "a")
    sums.sums.ordered(THERE, 0, 4, "a")
    sums.now = 100.0
    threads = [sums.done(HERE, 1), sums.done(HERE, 0)]
    assert all(thread.is_alive() for thread in threads)
    sums.now += 51.0
    sums.sums.lost(THERE, 0, "a")  # have them look at the clock
    for thread in threads:
        thread.join()
    assert sorted(sums.returned.values(), key=len) == [{}, of(0, 1)]  # those two together


def test_the_second_result_of_a_shard_goes_alone(sums: Sums) -> None:
    sums.sums.ordered(HERE, 0, 2, "a")
    for worker in ("a", "b"):  # two workers of the node compute one shard
        sums.sums.ordered(HERE, 1, 2, worker)
    sums.now = 100.0
    first = sums.done(HERE, 1)
    assert sums.sums.done(HERE, 1, "a copy", "b") == {1: "a copy"}
    assert sums.sums.done(HERE, 0, "result 0", "a") == of(0, 1)
    first.join()
    assert sums.sums.done(HERE, 1, "a late copy", "b") == {1: "a late copy"}


@pytest.mark.parametrize("lost", ["a copy", "the original"])
def test_a_result_that_waits_outlives_the_loss_of_another_worker_with_its_shard(
    sums: Sums, lost: str
) -> None:
    done, gone = ("a", "b") if lost == "a copy" else ("b", "a")
    sums.sums.ordered(HERE, 0, 2, "c")
    for worker in ("a", "b"):
        sums.sums.ordered(HERE, 1, 2, worker)
    sums.now = 100.0
    waiting = sums.done(HERE, 1, done)
    sums.sums.lost(HERE, 1, gone)
    assert sums.waits(HERE, 1)
    assert sums.sums.done(HERE, 0, "result 0", "c") == of(0, 1)
    waiting.join()
    assert not sums.sums._steps


def test_results_wait_for_a_shard_until_all_are_lost_who_compute_it(sums: Sums) -> None:
    sums.sums.ordered(HERE, 0, 2, "c")
    for worker in ("a", "b"):
        sums.sums.ordered(HERE, 1, 2, worker)
    sums.now = 100.0
    waiting = sums.done(HERE, 0, "c")
    sums.sums.lost(HERE, 1, "b")
    sums.sums.lost(HERE, 1, "b")  # its listener and whoever closes it both say so
    assert sums.waits(HERE, 0)
    sums.sums.lost(HERE, 1, "a")
    waiting.join()
    assert sums.returned[0] == of(0)
    assert not sums.sums._steps


class Model(nn.Module):
    """Two dtypes of parameters, a buffer of floats and one of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.low = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))


@pytest.mark.parametrize(("present", "shards"), [([0, 1], 4), ([2, 3], 4), ([4, 5, 6], 7)])
def test_a_sum_on_a_node_has_the_bits_of_the_coordinators(present: list[int], shards: int) -> None:
    model = Model()
    masters = Layout(trainable(model).items()).shared()
    bind(trainable(model), masters)
    kinds = {"mutable_frozen": (), "results": 8, "on_snapshots": False, "workers": 1}
    arena = Arena.create(model, masters, None, **kinds)
    generator = torch.Generator().manual_seed(0)
    images, slots = {}, []
    for shard in present:
        slot = arena.slot(shard)
        for vector in (*slot.flat.vectors, slot.floats):
            vector.copy_(torch.randn(vector.shape, generator=generator))
        slot.integer_buffers.fill_(shard)
        images[shard] = arena.slot_image(shard).copy()
        images[shard].setflags(write=False)  # as Ray's are
        slots.append(((0, shard), slot))
    before = {shard: image.copy() for shard, image in images.items()}
    adder = Adder(arena)
    found = adder.sum(images, shards).copy()
    assert np.array_equal(adder.sum(images, shards), found)  # again, in the memory of the first
    assert all(np.array_equal(images[shard], before[shard]) for shard in present)

    def add(left: object, right: object) -> object:
        for one, other in zip(left.flat.vectors, right.flat.vectors, strict=True):
            one.add_(other)
        left.floats.add_(right.floats)
        return left

    total = tree_sum(slots, shards, add, present=len(present))
    assert np.array_equal(found, arena.slot_image(present[0]))
    assert total.integer_buffers.eq(present[0]).all()
