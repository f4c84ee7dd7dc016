"""Tree of shards: an ordered sum along a fixed binary tree, the same for any workers.

Floating-point addition is not associative, so the bits of a sum depend on its order. The order of
this sum depends on the number of leaves V alone. Node (level k, index j) covers the leaves
[j * 2**k, (j + 1) * 2**k) below V. The value of a node is the value of the left half plus the value
of the right half, or the left half alone where the right half lies beyond V. A worker with a
contiguous run of shards therefore hands over at most 2 log2(V) vectors, the sums of the maximal
subtrees inside the run, and any number of workers gives the same bits.

``run_sums`` is the plan of such a worker: each addition is made as soon as the tree allows, so at
most log2(m) + 1 sums are held of m shards of a subtree. The plan is a pure function of the run. The
stages of a pipeline, each with a part of every vector, make the same additions without agreeing.

Legend: V shards of a step, m shards of a run.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
Node = tuple[int, int]  # (level, index); leaf s is (0, s)


def leaves(node: Node, shards: int) -> range:
    """Return the shards below a node."""
    level, index = node
    return range(index << level, min((index + 1) << level, shards))


def subtrees(shards: int, ranks: int, below: Node | None = None) -> list[Node]:
    """Return the nodes owned by ranks, in order, covering each shard once.

    The node with the most shards, the leftmost of several, is halved until every rank has a node,
    or every node is a shard. Surplus ranks own nothing.

    Args:
        below: the node whose shards they are. Default: all.
    """
    root: Node = below or ((shards - 1).bit_length(), 0)
    nodes = [root]
    while len(nodes) < min(len(leaves(root, shards)), ranks):
        place = max(range(len(nodes)), key=lambda n: (len(leaves(nodes[n], shards)), -n))
        nodes[place : place + 1] = _halves(nodes[place], shards)
    return nodes


def _halves(node: Node, shards: int) -> list[Node]:
    level, index = node
    left, right = (level - 1, 2 * index), (level - 1, 2 * index + 1)
    return [left, right] if leaves(right, shards) else _halves(left, shards)


class TreeSum(Generic[T]):
    """Collects the values of nodes, in any order, and adds siblings as soon as both are there.

    Args:
        leaves: V, the number of leaves of the whole tree.
        add: returns left + right. May add in place and return either argument.
    """

    def __init__(self, leaves: int, add: Callable[[T, T], T]) -> None:
        self.leaves = leaves
        self.parts: dict[Node, T] = {}
        self._add = add

    def put(self, node: Node, value: T) -> None:
        """Take the value of a node; later additions may be made in place in this value."""
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
    """Return the sum of the leaves, from nodes covering each leaf once.

    Args:
        present: number of leaves, if some are absent: a node with an absent half equals the half
            present.

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


class PlacedShard(NamedTuple):
    """The place of a shard, and the additions after it."""

    place: int  # that it is written to
    additions: tuple[tuple[int, int], ...]  # that follow, in order: place += place


class RunSums(NamedTuple):
    """The plan of a run: a place for each shard and sum, and the additions, in order."""

    puts: tuple[PlacedShard, ...]  # (m,)
    sums: dict[Node, int]  # by maximal subtree, in the order of shards: where its sum is at the end


def run_sums(shards: range, of: int, free: list[int]) -> RunSums:
    """Return how the shards of a run are added up.

    Args:
        shards: of the run.
        of: V.
        free: a heap of free places, the lowest used first; loses the places of the sums.

    Raises:
        IndexError: there are not enough places.
    """
    made: list[tuple[int, int]] = []

    def add(left: int, right: int) -> int:
        made.append((left, right))
        heapq.heappush(free, right)
        return left

    tree: TreeSum[int] = TreeSum(of, add)
    puts = []
    for shard in shards:
        place = heapq.heappop(free)
        made.clear()
        tree.put((0, shard), place)
        puts.append(PlacedShard(place, tuple(made)))
    in_order = sorted(tree.parts.items(), key=lambda part: leaves(part[0], of).start)
    return RunSums(tuple(puts), dict(in_order))
