"""Runs: the elements of each parameter in a piece of a rank's slice, in the order of files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from quorate.engines.collective.rank_slices import SlicePart
from quorate.replica.flat import Section


class Run(NamedTuple):
    """Consecutive elements of one parameter in a piece of a rank's slice."""

    piece: int  # index among the rank's pieces of an optimizer's tensor
    start: int  # offset in the piece
    length: int
    name: int  # index among the tensor's parameters
    at: int  # offset in the parameter, in the order of memory


def runs(places: Sequence[SlicePart], sections: Sequence[Section]) -> Iterator[Run]:
    """Yield the runs of some pieces of an optimizer's tensor.

    Args:
        places: places of the pieces in the tensor, in order.
        sections: sections of the tensor's parameters, in order.
    """
    which = 0
    for name, section in enumerate(sections):
        begin = section.start - sections[0].start
        end = begin + prod(section.shape)
        while which < len(places) and places[which].start + places[which].length <= begin:
            which += 1
        for piece in range(which, len(places)):
            place = places[piece]
            if place.start >= end:
                break
            start, stop = max(begin, place.start), min(end, place.start + place.length)
            if start < stop:
                yield Run(piece, start - place.start, stop - start, name, start - begin)


def is_by_rows(section: Section) -> bool:
    """Return whether a parameter's elements lie row by row in memory, as in files."""
    expected = 1
    for size, stride in zip(reversed(section.shape), reversed(section.stride), strict=True):
        if size != 1 and stride != expected:
            return prod(section.shape) == 0
        expected *= size
    return True
