"""Rows: the places of a sliced optimizer's state in a file, and the part written by each rank.

Slices are stretches of vectors, so a rank's part of an entry of a parameter is a stretch of the
file. The exception is a parameter not stored row by row in memory (channels_last, for example).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from math import prod
from typing import NamedTuple, TypeVar

import torch

from quorate.engines.partition import Partition, Piece
from quorate.replica.flat import Layout, Section
from quorate.training.optimizing.entries import Entries

T = TypeVar("T")

OPTIMIZER = "optimizer.safetensors"

# Bytes of parameters above which the state is not gathered on rank 0. With Adam, gathering takes
# five times as much: twice for the moments, and three times for a copy of everything, so that
# training continues. Up to this limit, gathering takes less memory than a process with torch
# imported (0.3 GiB).
GATHERED_BYTES = 64 << 20

# Clients of a network file system that write to the same page may undo each other's writes, and no
# page is larger than a block. So each block of the file has a single writer.
BLOCK_BYTES = 1 << 16
PIECE_BYTES = 16 << 20  # size of a transfer; rank 0 has memory for a single transfer


def is_large(layout: Layout) -> bool:
    """Return whether the state of parameters is too large for a single rank."""
    return layout.nbytes > GATHERED_BYTES


class Row(NamedTuple):
    """An entry of a parameter's state, with a value per element, and its place in the file."""

    name: str  # of the parameter
    entry: str
    dtype: str
    start: int  # bytes from the beginning of the file

    @property
    def itemsize(self) -> int:
        """The size of an element, in bytes."""
        size: int = getattr(torch, self.dtype).itemsize
        return size


class Part(NamedTuple):
    """A stretch of an entry that one rank has."""

    row: Row
    piece: Piece  # the rank's piece with the stretch
    start: int  # offset in the piece
    length: int
    at: int  # bytes from the beginning of the file; of no meaning if not stored row by row

    @property
    def nbytes(self) -> int:
        """The size of the stretch, in bytes."""
        return self.length * self.row.itemsize

    def of(self, entries: Entries) -> torch.Tensor:
        """Return the stretch in the state of the rank's pieces, as a view."""
        whole: torch.Tensor = entries[self.piece.key][self.row.entry]
        return whole[self.start : self.start + self.length]


def is_by_rows(section: Section) -> bool:
    """Return whether a parameter's elements lie row by row in memory, as in files."""
    expected = 1
    for size, stride in zip(reversed(section.shape), reversed(section.stride), strict=True):
        if size != 1 and stride != expected:
            return prod(section.shape) == 0
        expected *= size
    return True


class Rows:
    """The rows to write or read, and the parts of each rank.

    Args:
        rows: the rows, the same on all ranks.
        partition: the partition of the parameters among the ranks.
    """

    def __init__(self, rows: Sequence[Row], partition: Partition) -> None:
        self.rows, self.sections = rows, partition.whole.sections
        self._by_rows = [row for row in rows if is_by_rows(self.sections[row.name])]
        # Parameters not stored row by row in memory.
        self.strided = [row for row in rows if not is_by_rows(self.sections[row.name])]
        self._pieces = cache(partial(_by_name, partition))

    def of(self, rank: int, rows: Iterable[Row]) -> Iterator[Part]:
        """Yield a rank's parts of some rows: a part per piece."""
        for row in rows:
            for piece in self._pieces(rank).get(row.name, ()):
                yield Part(row, piece, 0, piece.length, row.start + piece.start * row.itemsize)

    def parts(self, rank: int, *, blocks: bool = True, beside: bool = True) -> Iterator[Part]:
        """Yield a rank's parts, without parameters not stored row by row in memory.

        Args:
            rank: the rank.
            blocks: whether to yield whole blocks of the file.
            beside: whether to yield parts of blocks, which ranks may share.
        """
        for part in self.of(rank, self._by_rows):
            begin, end, size = part.at, part.at + part.nbytes, part.row.itemsize
            first, last = -(-begin // BLOCK_BYTES) * BLOCK_BYTES, end - end % BLOCK_BYTES
            if blocks and beside:
                spans = [(begin, end)]
            elif first >= last:
                spans = [(begin, end)] if beside else []
            else:
                spans = [(begin, first), (last, end)] if beside else [(first, last)]
            for start, stop in spans:
                for at in range(start, stop, PIECE_BYTES):
                    length = (min(stop, at + PIECE_BYTES) - at) // size
                    yield part._replace(start=(at - begin) // size, length=length, at=at)


def _by_name(partition: Partition, rank: int) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for piece in partition.pieces(rank):
        found.setdefault(piece.name, []).append(piece)
    return found


def chunks(of: Iterator[Part]) -> Iterator[list[Part]]:
    """Yield lists of parts to send together, of ``PIECE_BYTES`` at most in all."""
    chunk: list[Part] = []
    nbytes = 0
    for part in of:
        if chunk and nbytes + part.nbytes > PIECE_BYTES:
            yield chunk
            chunk, nbytes = [], 0
        chunk.append(part)
        nbytes += part.nbytes
    if chunk:
        yield chunk


def in_turns(of: Mapping[int, Iterator[T]]) -> Iterator[tuple[int, T]]:
    """Yield an item of each rank in turn, until all items are yielded: no rank waits for long."""
    left = {**of}
    while left:
        for rank in [*left]:
            for item in left[rank]:
                yield rank, item
                break
            else:
                del left[rank]
