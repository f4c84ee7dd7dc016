"""Gradients of a replica in stages: vectors in shared memory. Each stage writes separate slices.

The first write of a page takes the page from the machine, for the writing process: of each vector a
stage has the pages of its own parameters, and an unused vector costs nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection

from quorate.coordination.tree import RunSums, run_sums
from quorate.machine.shared_memory import Segment
from quorate.replica.flat import Flat, Layout

_PAGE = 4096


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
        places = 1 + max(put.place for put in run_sums(run, of, [*range(len(run))]).puts)
        count = 2 * max(places, of.bit_length() + 1) + 2
        nbytes = -(-max(1, layout.nbytes) // _PAGE) * _PAGE
        self._segment = Segment(count * nbytes)
        self.vectors = [layout.over(self._segment, number * nbytes) for number in range(count)]
        self._numbers = {id(flat): number for number, flat in enumerate(self.vectors)}
        self._free = [*range(count)]  # a heap

    def lend(self, run: range, of: int) -> RunSums | None:
        """Return the sums of a run of shards, with vectors' numbers as places; None: too few.

        The vectors of shards that are added to others are free again when the run is computed.

        Args:
            of: V, the shards of the step.
        """
        free = [*self._free]
        try:
            plan = run_sums(run, of, free)
        except IndexError:
            return None
        self._free = free
        return plan

    def give_back(self, numbers: Collection[int]) -> None:
        """Take back vectors without readers."""
        for number in numbers:
            heapq.heappush(self._free, number)

    def recycle(self, flat: Flat) -> None:
        """Take back a vector without readers, if the vector is of the pool."""
        if (number := self._numbers.get(id(flat))) is not None:
            heapq.heappush(self._free, number)
