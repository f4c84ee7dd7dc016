"""Ranks own whole subtrees and whole blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.coordination.ownership import BLOCK, leaves, slices, slowest_factor, subtrees
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
    assert slowest_factor(shards, ranks) == max(expected) / -(-shards // ranks)


@given(size=st.integers(0, 40 * BLOCK), ranks=st.integers(1, 9))
def test_slices_cover_a_vector_and_are_whole_blocks(size: int, ranks: int) -> None:
    cut = slices(size, ranks)
    assert [piece.start for piece in cut] == [0, *(piece.stop for piece in cut[:-1])]
    assert cut[-1].stop == size
    assert all(piece.start % BLOCK == 0 for piece in cut if len(piece))
    blocks = [-(-len(piece) // BLOCK) for piece in cut]
    assert max(blocks) - min(blocks) <= 1
