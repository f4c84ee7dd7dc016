"""Gradients of a replica in stages: vectors in shared memory, to which stages write their parts.

Pages are taken from the machine when they are first written, by the process that writes them: of
each vector a stage has the pages of its own parameters, and a vector that nobody uses costs
nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from typing import NamedTuple

from quorate.coordination.tree import Put, run_sums
from quorate.machine.shared_memory import Segment
from quorate.replica.flat import Flat, Layout

_PAGE = 4096


class LentVectors(NamedTuple):
    """Vectors of the pool for one run of shards."""

    puts: tuple[Put, ...]  # what becomes of each shard; places are vectors' numbers
    sums: tuple[tuple[int, int], ...]  # which shard of the run each sum begins with, and its number
    numbers: tuple[int, ...]  # of all that is lent


class GradientPool:
    """Some vectors of a layout, of which the first ones are used first.

    Args:
        layout: of gradients.
        run: how many shards are to be added up,
        of: and how many their step has.
    """

    def __init__(self, layout: Layout, run: range, of: int) -> None:
        # For the run, and as much for results of others of its step that are not added yet. It is
        # address space that they take, and no memory.
        count = 2 * max(run_sums(run, of).places, of.bit_length() + 1) + 2
        nbytes = -(-max(1, layout.nbytes) // _PAGE) * _PAGE
        self._segment = Segment(count * nbytes)
        self.vectors = [layout.over(self._segment, number * nbytes) for number in range(count)]
        self._numbers = {id(flat): number for number, flat in enumerate(self.vectors)}
        self._free = [*range(count)]  # a heap: low first, so that few are written

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
            Put(numbers[place], tuple((numbers[left], numbers[right]) for left, right in additions))
            for place, additions in plan.puts
        )
        first = (shard - run.start for shard in plan.first)
        sums = zip(first, (numbers[place] for place in plan.sums.values()), strict=True)
        return LentVectors(tuple(puts), tuple(sums), tuple(numbers))

    def give_back(self, numbers: Collection[int]) -> None:
        """Have vectors be used again: nobody reads them any more."""
        for number in numbers:
            heapq.heappush(self._free, number)

    def number_of(self, flat: Flat) -> int | None:
        """Return the number of a vector; None: it is none of these."""
        return self._numbers.get(id(flat))
