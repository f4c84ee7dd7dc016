"""The ordered sum: one order of additions, whoever adds.

Legend: V leaves, N workers. A split of the leaves is a contiguous run for each worker.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shown_sums import add, leaf, whole_sum

from quorate.coordination.tree import TreeSum, tree_sum

T = TypeVar("T")

fixed = settings(max_examples=200, derandomize=True, deadline=None, database=None)


def sum_in_runs(
    leaves: Sequence[T], cuts: Sequence[int], plus: Callable[[T, T], T], order: random.Random
) -> T:
    """Each worker sums its run, in any order of its leaves; then all their parts, in any order."""
    edges = [0, *sorted(cuts), len(leaves)]
    parts = []
    for start, end in pairwise(edges):
        tree = TreeSum(len(leaves), plus)
        for shard in order.sample(range(start, end), end - start):
            tree.put((0, shard), leaves[shard])
        parts += tree.parts.items()
    order.shuffle(parts)
    return tree_sum(parts, len(leaves), plus)


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, list[int]]:
    """V in 1..40, and where the leaves are cut; some workers have none."""
    leaves = draw(st.integers(1, 40))
    return leaves, draw(st.lists(st.integers(0, leaves), max_size=8))


@pytest.mark.parametrize(
    ("leaves", "expected"),
    [
        (1, "7.0"),
        (2, "(7.0+7.1)"),
        (3, "((7.0+7.1)+7.2)"),
        (4, "((7.0+7.1)+(7.2+7.3))"),
        (5, "(((7.0+7.1)+(7.2+7.3))+7.4)"),
        (6, "(((7.0+7.1)+(7.2+7.3))+(7.4+7.5))"),
        (7, "(((7.0+7.1)+(7.2+7.3))+((7.4+7.5)+7.6))"),
    ],
)
def test_the_order_of_the_sum_is_this(leaves: int, expected: str) -> None:
    parts = [((0, shard), leaf(7, shard)) for shard in range(leaves)]
    assert tree_sum(parts, leaves, add) == whole_sum(7, leaves) == expected


@given(splits(), st.integers(0, 1000))
@fixed
def test_any_split_and_any_order_of_arrival_give_the_same_order_of_additions(
    split: tuple[int, list[int]], seed: int
) -> None:
    leaves, cuts = split
    strings = [leaf(0, shard) for shard in range(leaves)]
    assert sum_in_runs(strings, cuts, add, random.Random(seed)) == whole_sum(0, leaves)


@given(splits(), st.integers(0, 1000))
@fixed
def test_any_split_and_any_order_of_arrival_give_the_same_float32_bits(
    split: tuple[int, list[int]], seed: int
) -> None:
    leaves, cuts = split
    generator = torch.Generator().manual_seed(seed)
    scales = 10.0 ** torch.randint(-6, 7, (leaves, 1), generator=generator)
    vectors = torch.randn(leaves, 64, generator=generator) * scales

    def in_place(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left.add_(right)

    one_run = sum_in_runs(list(vectors.clone()), [], in_place, random.Random(0))
    any_runs = sum_in_runs(list(vectors.clone()), cuts, in_place, random.Random(seed))
    assert torch.equal(any_runs.view(torch.int32), one_run.view(torch.int32))


def test_other_orders_give_other_float32_bits() -> None:
    """Else the test above would show nothing."""
    vectors = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    one_run = sum_in_runs(list(vectors), [], torch.add, random.Random(0))
    assert not torch.equal(one_run, sum(vectors[1:], vectors[0]))


@given(st.integers(1, 40), st.integers(0, 1000))
@fixed
def test_shards_that_are_no_run_give_the_same_sum_too(leaves: int, seed: int) -> None:
    """As after a takeover: anyone may hold anything."""
    order = random.Random(seed)
    trees = [TreeSum(leaves, add) for _ in range(3)]
    for shard in range(leaves):
        order.choice(trees).put((0, shard), leaf(0, shard))
    parts = [part for tree in trees for part in tree.parts.items()]
    assert tree_sum(parts, leaves, add) == whole_sum(0, leaves)


def test_a_run_of_a_worker_leaves_few_parts() -> None:
    for leaves in range(1, 65):
        for start in range(leaves):
            tree = TreeSum(leaves, add)
            for shard in range(start, leaves):
                tree.put((0, shard), leaf(0, shard))
                assert len(tree.parts) <= 2 * math.log2(leaves) + 2


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_a_run_of_a_power_of_two_leaves_one_part(workers: int) -> None:
    size = 8 // workers
    for worker in range(workers):
        tree = TreeSum(8, add)
        for shard in range(worker * size, (worker + 1) * size):
            tree.put((0, shard), leaf(0, shard))
        assert list(tree.parts) == [(size.bit_length() - 1, worker)]


@given(st.integers(1, 40), st.integers(0, 1000))
@fixed
def test_there_is_no_root_before_the_last_leaf(leaves: int, seed: int) -> None:
    tree = TreeSum(leaves, add)
    for shard in random.Random(seed).sample(range(leaves), leaves):
        assert tree.root is None
        tree.put((0, shard), leaf(0, shard))
    assert tree.root == whole_sum(0, leaves)


def test_one_leaf_is_its_own_sum() -> None:
    tree = TreeSum(1, add)
    assert tree.root is None
    tree.put((0, 0), "only")
    assert tree.root == "only"
    assert tree.parts == {(0, 0): "only"}


@pytest.mark.parametrize("missing", range(5))
def test_a_sum_of_incomplete_parts_is_refused(missing: int) -> None:
    parts = [((0, shard), leaf(0, shard)) for shard in range(5) if shard != missing]
    with pytest.raises(ValueError, match="cover 4 of 5 leaves"):
        tree_sum(parts, 5, add)


def test_a_sum_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="cover 0 of 3 leaves"):
        tree_sum([], 3, add)
