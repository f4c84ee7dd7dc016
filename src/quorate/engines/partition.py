"""Partitions: which elements of each parameter each owner has. Integers alone decide.

Owners are servers, or the ranks of a collective. An owner has ranges of the flat vectors, cut
between blocks of a fixed size; a parameter at a cut has a piece on several owners. Flat vectors and
gradients of one layout have the same partition on every machine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import islice
from math import prod
from typing import NamedTuple

import torch

from quorate.coordination.ownership import BLOCK, slices
from quorate.replica.flat import Flat, Layout, Section

Ranges = list[tuple[int, range]]  # pairs of a vector's number and a range of the vector


class Piece(NamedTuple):
    """Consecutive elements of one parameter, in the order of memory, with one owner."""

    key: str  # names the piece among the pieces of its owner
    name: str  # of the parameter
    start: int  # offset in the parameter
    length: int

    @property
    def stop(self) -> int:
        """The first element behind the piece."""
        return self.start + self.length


class Block(NamedTuple):
    """A stretch of a vector with some parameters alone, within a block of the vector."""

    vector: int
    start: int  # offset in the vector
    number: int  # of the owner's range with the stretch
    at: range  # in the range


class Partition:
    """The ranges of all owners of the vectors of one layout.

    Args:
        layout: layout of the whole vectors.
        ranges: ranges of each owner, by owner; no range cuts a block of a vector.
    """

    def __init__(self, layout: Layout, ranges: Sequence[Ranges]) -> None:
        self.whole, self.ranges = layout, ranges
        self._sections: list[list[Section]] = [[] for _ in layout.sizes]  # by vector, in order
        for section in sorted(layout.sections.values(), key=lambda section: section.start):
            if section.span:
                self._sections[section.vector].append(section)
        self._of = cache(self._cut)
        self._blocks = cache(self._cut_blocks)

    @staticmethod
    def of_one_owner(layout: Layout) -> Partition:
        """Return the partition with a single owner, who has all vectors."""
        return Partition(layout, [[(n, range(size)) for n, size in enumerate(layout.sizes)]])

    @staticmethod
    def among(layout: Layout, count: int) -> Partition:
        """Return the partition with at most one range of each vector for each of some owners."""
        cuts = [slices(range(size), count) for size in layout.sizes]
        own = ([(n, of[owner]) for n, of in enumerate(cuts) if of[owner]] for owner in range(count))
        return Partition(layout, [*own])

    def layout(self, owner: int) -> Layout:
        """Return the layout of an owner's slice: a vector for each range, a tensor per piece."""
        return self._of(owner)[0]

    def pieces(self, owner: int) -> list[Piece]:
        """Return the pieces of parameters of an owner, in the order of its ranges."""
        return self._of(owner)[1]

    def by_name(self, owner: int) -> dict[str, list[Piece]]:
        """Return the pieces of an owner by parameter, in the order of its ranges."""
        return self._of(owner)[2]

    def blocks(self, owner: int, names: frozenset[str] | None = None) -> list[Block]:
        """Return the stretches of some parameters in an owner's ranges, cut at blocks.

        The stretches of all owners are the same for any partition.

        Args:
            names: the parameters; None for all.
        """
        return self._blocks(owner, names)

    def views(self, whole: Flat, owner: int) -> list[torch.Tensor]:
        """Return an owner's ranges of whole vectors, as views."""
        return [whole.vectors[n][span.start : span.stop] for n, span in self.ranges[owner]]

    def _cut_blocks(self, owner: int, names: frozenset[str] | None) -> list[Block]:
        found = []
        for number, (vector, span) in enumerate(self.ranges[owner]):
            for run in self._runs(vector, names):
                start, stop = max(run.start, span.start), min(run.stop, span.stop)
                while start < stop:
                    end = min(stop, start - start % BLOCK + BLOCK)
                    at = range(start - span.start, end - span.start)
                    found.append(Block(vector, start, number, at))
                    start = end
        return found

    def _runs(self, vector: int, names: frozenset[str] | None) -> list[range]:
        """Return the longest ranges of a vector with no parameters but the named ones."""
        runs: list[range] = []
        for section in self._sections[vector]:
            if names is not None and section.name not in names:
                continue
            end = section.start + section.span
            if runs and runs[-1].stop == section.start:
                runs[-1] = range(runs[-1].start, end)
            else:
                runs.append(range(section.start, end))
        return runs

    def norm(
        self,
        squares: Sequence[Sequence[float]],
        names: frozenset[str] | None = None,
        rows: Sequence[float] = (),
    ) -> float:
        """Return the norm of some parameters: the same number for any partition.

        Args:
            squares: squared norm of each of the ``blocks``, by owner.
            names: the parameters; None for all.
            rows: squared norms of values outside of the vectors.
        """
        # A float sum depends on its order: blocks are added in the order of the vectors.
        found: dict[tuple[int, int], float] = {}
        for owner, own in enumerate(squares):
            starts = ((block.vector, block.start) for block in self.blocks(owner, names))
            found.update(zip(starts, own, strict=True))
        return root([*(found[start] for start in sorted(found)), *rows])

    def _cut(self, owner: int) -> tuple[Layout, list[Piece], dict[str, list[Piece]]]:
        made, pieces = Layout(()), list[Piece]()
        for number, (vector, span) in enumerate(self.ranges[owner]):
            made.dtypes.append(self.whole.dtypes[vector])
            made.sizes.append(len(span))
            sections = self._sections[vector]
            first = bisect_right(sections, span.start, key=lambda section: section.start) - 1
            for section in islice(sections, max(0, first), None):
                start = max(section.start, span.start)
                stop = min(section.start + section.span, span.stop)
                if start >= stop:
                    break
                key, at = str(len(pieces)), start - section.start
                length = min(prod(section.shape) - at, stop - start)  # without the gap
                pieces.append(Piece(key, section.name, at, length))
                place = start - span.start
                made.sections[key] = Section(key, number, place, stop - start, (length,), (1,))
        by_name: dict[str, list[Piece]] = {}
        for piece in pieces:
            by_name.setdefault(piece.name, []).append(piece)
        return made, pieces, by_name


def root(squares: Iterable[float]) -> float:
    """Return the root of a sum, added in the order of the numbers."""
    total = 0.0
    for square in squares:
        total += square
    return float(total**0.5)
