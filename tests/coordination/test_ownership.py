"""Ranks own whole subtrees and whole blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.coordination.ownership import (
    BLOCK,
    blocks_of_bucket,
    buckets,
    leaves,
    slices,
    subtrees,
)
from quorate.coordination.tree import TreeSum, tree_sum


def added(left: str, right: str) -> str:
    return f"({left}{right})"


@given(shards=st.integers(1, 70), ranks=st.integers(1, 40))
def test_each_rank_hands_over_one_sum_and_all_of_them_make_the_tree(
    shards: int, ranks: int
) -> None:
    nodes = subtrees(shards, ranks)
    assert len(nodes) == min(shards, ranks)
    owned = [leaves(node, shards) for node in nodes]
    assert [shard for run in owned for shard in run] == list(range(shards))
    parts = []
    for run in owned:
        tree: TreeSum[str] = TreeSum(shards, added)
        for shard in run:
            tree.put((0, shard), f"{shard} ")
        parts += tree.parts.items()
    assert len(parts) == len(nodes)
    alone = tree_sum((((0, shard), f"{shard} ") for shard in range(shards)), shards, added)
    assert tree_sum(parts, shards, added) == alone


@pytest.mark.parametrize(
    ("shards", "ranks", "expected"),
    [
        (8, 3, [2, 2, 4]),
        (8, 2, [4, 4]),
        (8, 8, [1] * 8),
        (5, 2, [4, 1]),
        (5, 3, [2, 2, 1]),
        (7, 3, [2, 2, 3]),
        (3, 5, [1, 1, 1]),
    ],
)
def test_the_largest_is_halved_first(shards: int, ranks: int, expected: list[int]) -> None:
    assert [len(leaves(node, shards)) for node in subtrees(shards, ranks)] == expected


@given(size=st.integers(0, 40 * BLOCK), ranks=st.integers(1, 9), blocks=st.integers(0, 20))
def test_slices_cover_a_vector_and_are_whole_blocks(size: int, ranks: int, blocks: int) -> None:
    cut = [slices(bucket, ranks, turn) for turn, bucket in enumerate(buckets(size, blocks))]
    pieces = sorted((piece for of in cut for piece in of if len(piece)), key=lambda p: p.start)
    assert [piece.start for piece in pieces] == [0, *(p.stop for p in pieces)][: len(pieces)]
    assert sum(map(len, pieces)) == size
    assert all(piece.start % BLOCK == 0 for piece in pieces)
    for of in cut:
        owned = [-(-len(piece) // BLOCK) for piece in of]
        assert max(owned) - min(owned) <= 1
        assert sum(owned) <= max(1, blocks)


@given(size=st.integers(1, 4000 * BLOCK), ranks=st.integers(1, 70), most=st.integers(1, 64))
def test_buckets_between_hosts_have_something_for_each_rank(
    size: int, ranks: int, most: int
) -> None:
    blocks = blocks_of_bucket(size, ranks, most)
    assert min(most, ranks) <= blocks <= most
    messages = max(len(part) for part in slices(buckets(size, blocks)[0], ranks))
    assert messages <= 4 * BLOCK  # 1 MB of float32
    if blocks > ranks:
        assert len(buckets(size, blocks)) >= 8


def test_over_many_buckets_all_ranks_have_as_much() -> None:
    """50 buckets of 64 blocks on 3 ranks: nobody has the odd block of each."""
    cut = [slices(b, 3, turn) for turn, b in enumerate(buckets(50 * 64 * BLOCK, 64))]
    owned = [sum(len(of[rank]) for of in cut) / BLOCK for rank in range(3)]
    assert max(owned) - min(owned) <= 1
