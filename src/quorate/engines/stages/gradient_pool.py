"""Gradients of a replica in stages: vectors in shared memory. Each stage writes separate slices.

The first write of a page takes the page from the machine, for the writing process: of each vector a
stage has the pages of its own parameters, and an unused vector costs nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from typing import NamedTuple

from quorate.coordination.tree import PlacedShard, run_sums
from quorate.machine.shared_memory import Segment
from quorate.replica.flat import Flat, Layout

_PAGE = 4096


class LentVectors(NamedTuple):
    """The vectors of the pool for a run of shards."""

    puts: tuple[PlacedShard, ...]  # place and additions of each shard; places are vectors' numbers
    sums: tuple[tuple[int, int], ...]  # of each sum the first shard in the run, and the vector
    numbers: tuple[int, ...]  # of all lent vectors


class GradientPool:
    """Some vectors of a layout, used in order of their numbers, so that few are written.

    Args:
        layout: of gradients.
        run: the shards to be added up.
        of: V, the shards of their step.
    """

    def __init__(self, layout: Layout, run: range, of: int) -> None:
        # For the run, and as many for earlier results of the step that are not added yet. The
        # vectors take address space, and no memory.
        count = 2 * max(run_sums(run, of).places, of.bit_length() + 1) + 2
        nbytes = -(-max(1, layout.nbytes) // _PAGE) * _PAGE
        self._segment = Segment(count * nbytes)
        self.vectors = [layout.over(self._segment, number * nbytes) for number in range(count)]
        self._numbers = {id(flat): number for number, flat in enumerate(self.vectors)}
        self._free = [*range(count)]  # a heap

    def lend(self, run: range, of: int) -> LentVectors | None:
        """Return vectors for a run of shards; None: there are not enough.

        Args:
            of: V, the shards of the step.
        """
        plan = run_sums(run, of)
        if len(self._free) < plan.places:
            return None
        numbers = [heapq.heappop(self._free) for _ in range(plan.places)]
        puts = (
            PlacedShard(
                numbers[place], tuple((numbers[left], numbers[right]) for left, right in additions)
            )
            for place, additions in plan.puts
        )
        first = (shard - run.start for shard in plan.first)
        sums = zip(first, (numbers[place] for place in plan.sums.values()), strict=True)
        return LentVectors(tuple(puts), tuple(sums), tuple(numbers))

    def give_back(self, numbers: Collection[int]) -> None:
        """Take back vectors without readers."""
        for number in numbers:
            heapq.heappush(self._free, number)

    def recycle(self, flat: Flat) -> None:
        """Take back a vector without readers, if the vector is of the pool."""
        if (number := self._numbers.get(id(flat))) is not None:
            heapq.heappush(self._free, number)
