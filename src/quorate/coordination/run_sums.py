"""Sums of a run: how whoever computes shards in their order adds them up, and holds few sums.

The order of a sum is fixed by the tree of shards (``tree.py``). Of a run of shards as many sums are
left as it has maximal subtrees; in between each addition is made as soon as the tree allows it. So
of m shards that make up a subtree at most log2(m) + 1 sums are held at a time.

All of it is a pure function of the run. Several who each have a part of every vector, as the stages
of a pipeline have, make the same additions in the same places, and need not agree on any.

Legend: V shards of a step, m shards of a run.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from quorate.coordination.ownership import leaves
from quorate.coordination.tree import Node, TreeSum


class Put(NamedTuple):
    """What becomes of one shard."""

    place: int  # that it is written to
    additions: tuple[tuple[int, int], ...]  # that follow, in order: place += place


class RunSums(NamedTuple):
    """What becomes of the shards of a run, in their order."""

    puts: tuple[Put, ...]  # (m,)
    places: int  # how many are used, from 0 on
    sums: dict[Node, int]  # by maximal subtree, in the order of shards: where its sum is at the end
    first: tuple[int, ...]  # (sums,) the first shard of each


def run_sums(shards: range, of: int) -> RunSums:
    """Return how the shards of a run are added up.

    Args:
        shards: of the run.
        of: V.
    """
    free, used = list[int](), 0
    made: list[tuple[int, int]] = []

    def add(left: int, right: int) -> int:
        made.append((left, right))
        heapq.heappush(free, right)
        return left

    tree: TreeSum[int] = TreeSum(of, add)
    puts = []
    for shard in shards:
        if not free:
            heapq.heappush(free, used)
            used += 1
        place = heapq.heappop(free)
        made.clear()
        tree.put((0, shard), place)
        puts.append(Put(place, tuple(made)))
    in_order = sorted(tree.parts.items(), key=lambda part: leaves(part[0], of).start)
    first = tuple(leaves(node, of).start for node, _ in in_order)
    return RunSums(tuple(puts), used, dict(in_order), first)
