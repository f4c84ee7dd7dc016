"""Rows: where a file has the state of a sliced optimizer, and what of it each rank writes.

A rank's part of an entry of a parameter is a stretch of the file, as slices are stretches of
vectors; but for a parameter that does not lie row by row in memory (channels_last, say).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

from quorate.replica.flat import Layout, Section
from quorate.training.optimizing.runs import Run, is_by_rows

T = TypeVar("T")

OPTIMIZER = "optimizer.safetensors"

# Bytes of parameters above which the state is not gathered on rank 0. With Adam that takes five
# times as much: twice for its moments, and three times for a copy of all, so that training goes on.
# Up to here this is less than what a process takes that has imported torch (0.3 GiB).
GATHERED_BYTES = 64 << 20

# Several clients of a network file system that write to one page may undo each other's writes, and
# pages have at most so many bytes. So a block of the file has one writer.
BLOCK_BYTES = 1 << 16
PIECE_BYTES = 16 << 20  # that are sent at a time: rank 0 has memory for so much


def is_large(layout: Layout) -> bool:
    """Return whether no rank is to have all of the state of parameters."""
    return layout.nbytes > GATHERED_BYTES


class Row(NamedTuple):
    """One entry of one of the optimizer's tensors, and where the file has it."""

    number: int  # of the tensor
    entry: str
    dtype: str
    starts: list[int]  # by the tensor's parameters: bytes from the beginning of the file

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        size: int = getattr(torch, self.dtype).itemsize
        return size


class Part(NamedTuple):
    """What is written, or sent, at a time."""

    row: Row
    run: Run
    at: int  # bytes from the beginning of the file

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return self.run.length * self.row.itemsize


def parts(
    rows: Sequence[Row],
    runs_of: Callable[[Row], Sequence[Run]],
    sections: Sequence[Sequence[Section]],
    *,
    blocks: bool,
    beside: bool,
) -> Iterator[Part]:
    """Yield what of some rows a rank has that lies row by row.

    Args:
        runs_of: gives the rank's runs of a row.
        sections: of the parameters, by the optimizer's tensors.
        blocks: whether whole blocks of the file are wanted.
        beside: whether what shares a block with others' is.
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
    """Yield parts that are sent together."""
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
    """Yield one of each rank's, and so on until there are no more: so none of them waits long."""
    left = {**of}
    while left:
        for rank in [*left]:
            for item in left[rank]:
                yield rank, item
                break
            else:
                del left[rank]
