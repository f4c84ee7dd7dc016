"""Rows: the places of a sliced optimizer's state in a file, and the part written by each rank.

Slices are stretches of vectors, so a rank's part of an entry of a parameter is a stretch of the
file. The exception is a parameter not stored row by row in memory (channels_last, for example).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

from quorate.replica.flat import Layout, Section
from quorate.training.optimizing.runs import Run, is_by_rows

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
    """An entry of a tensor of the optimizer, with the places in the file."""

    number: int  # number of the tensor
    entry: str
    dtype: str
    starts: list[int]  # by parameter of the tensor: bytes from the beginning of the file

    @property
    def itemsize(self) -> int:
        """The size of an element, in bytes."""
        size: int = getattr(torch, self.dtype).itemsize
        return size


class Part(NamedTuple):
    """A stretch of the file, written or sent at once."""

    row: Row
    run: Run
    at: int  # bytes from the beginning of the file

    @property
    def nbytes(self) -> int:
        """The size of the stretch, in bytes."""
        return self.run.length * self.row.itemsize


def parts(
    rows: Sequence[Row],
    runs_of: Callable[[Row], Sequence[Run]],
    sections: Sequence[Sequence[Section]],
    *,
    blocks: bool,
    beside: bool,
) -> Iterator[Part]:
    """Yield a rank's parts of some rows, without parameters not stored row by row in memory.

    Args:
        runs_of: returns the rank's runs of a row.
        sections: sections of the parameters, by tensor of the optimizer.
        blocks: whether to yield whole blocks of the file.
        beside: whether to yield parts of blocks, which ranks may share.
    """
    for row in rows:
        size = row.itemsize
        for run in runs_of(row):
            if not is_by_rows(sections[row.number][run.name]):
                continue
            begin = row.starts[run.name] + run.at * size
            end = begin + run.length * size
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
                    part = run._replace(start=run.start + (at - begin) // size, length=length)
                    yield Part(row, part, at)


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
