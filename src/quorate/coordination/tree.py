"""One ordered sum: shards are added along one fixed binary tree, whoever adds them.

Floating-point addition is not associative, so the bits of a sum depend on its order. Here the
order is a property of the number of leaves V alone. Node (level k, index j) covers the leaves
[j * 2**k, (j + 1) * 2**k) below V, and its value is the value of its left half plus that of its
right half; a node whose right half lies beyond V is its left half. A worker that has computed a
contiguous run of shards therefore hands over at most 2 log2(V) vectors, the sums of the maximal
subtrees inside its run, and any number of workers gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")
Node = tuple[int, int]  # (level, index); leaf s is (0, s)


class TreeSum(Generic[T]):
    """Collects the values of nodes, in any order, and adds siblings as soon as both are there.

    Args:
        leaves: V, the number of leaves of the whole tree.
        add: returns left + right. It may add in place and return either one.
    """

    def __init__(self, leaves: int, add: Callable[[T, T], T]) -> None:
        self.leaves = leaves
        self.parts: dict[Node, T] = {}
        self._add = add

    def put(self, node: Node, value: T) -> None:
        """Take the value of a node; the caller gives it away, it may be added to in place."""
        level, index = node
        while not (index == 0 and 1 << level >= self.leaves):
            right_is_empty = (index ^ 1) << level >= self.leaves
            if not right_is_empty:
                sibling = self.parts.pop((level, index ^ 1), None)
                if sibling is None:
                    break
                value = self._add(sibling, value) if index & 1 else self._add(value, sibling)
            level, index = level + 1, index >> 1
        self.parts[(level, index)] = value

    @property
    def root(self) -> T | None:
        """The sum of all leaves, once they are all in."""
        level = max(self.leaves - 1, 0).bit_length()
        return self.parts.get((level, 0))


def tree_sum(
    parts: Iterable[tuple[Node, T]],
    leaves: int,
    add: Callable[[T, T], T],
    present: int | None = None,
) -> T:
    """Return the sum of the leaves, from nodes that cover each once.

    Args:
        present: how many leaves there are, if some are absent: a node of which one half is absent
            is the other half.

    Raises:
        ValueError: there are more or fewer.
    """
    parts = [*parts]
    if len(parts) == 1 and present in (None, leaves):  # one worker has summed all of them
        ((level, index), value) = parts[0]
        if index == 0 and 1 << level >= leaves:
            return value
    tree = TreeSum(leaves, add)
    covered = 0
    for (level, index), value in parts:
        covered += min((index + 1) << level, leaves) - (index << level)
        tree.put((level, index), value)
    if covered != (leaves if present is None else present):
        raise ValueError(f"the nodes {sorted(tree.parts)} cover {covered} of {leaves} leaves")
    if (root := tree.root) is not None:
        return root
    for level in range((leaves - 1).bit_length()):
        for node in sorted(node for node in tree.parts if node[0] == level):
            tree.put((level + 1, node[1] >> 1), tree.parts.pop(node))
    assert tree.root is not None
    return tree.root
