"""Sums that show their order: strings, and an addition that is not associative."""

from __future__ import annotations

from collections.abc import Collection


def leaf(step: int, shard: int) -> str:
    """What shard s of step t yields, whoever computes it."""
    return f"{step}.{shard}"


def add(left: str, right: str) -> str:
    """An addition that is not associative, so that its order shows."""
    return f"({left}+{right})"


def whole_sum(step: int, shards: int, present: Collection[int] | None = None) -> str:
    """The sum of a step, straight from the definition of the tree and not by ``TreeSum``.

    Of all shards or of those that are present: a node with one child is that child.
    """

    def node(level: int, index: int) -> str:
        if level == 0:
            return leaf(step, index) if present is None or index in present else ""
        left = node(level - 1, 2 * index)
        right = "" if (2 * index + 1) << (level - 1) >= shards else node(level - 1, 2 * index + 1)
        return add(left, right) if left and right else left or right

    return node((shards - 1).bit_length(), 0)
