"""Sums that show their order: strings, and an addition without associativity."""

from collections.abc import Collection


def leaf(step: int, shard: int) -> str:
    """Return the result of shard s of step t, whoever computes the shard."""
    return f"{step}.{shard}"


def add(left: str, right: str) -> str:
    """Add without associativity, to show the order."""
    return f"({left}+{right})"


def whole_sum(step: int, shards: int, present: Collection[int] | None = None) -> str:
    """Return the sum of a step, straight from the definition of the tree and not by ``TreeSum``.

    Sums all shards or the present shards: a node with a single child is the child.
    """

    def node(level: int, index: int) -> str:
        if level == 0:
            return leaf(step, index) if present is None or index in present else ""
        left = node(level - 1, 2 * index)
        right = "" if (2 * index + 1) << (level - 1) >= shards else node(level - 1, 2 * index + 1)
        return add(left, right) if left and right else left or right

    return node((shards - 1).bit_length(), 0)
