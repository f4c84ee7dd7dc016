"""Reading a checkpoint's file: each rank reads a part of the optimizer's state.

A rank that sees the file reads its stretches of the file. For each of the other ranks, rank 0
reads the stretches and sends them, piece by piece.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from quorate.engines.collective.rank_control import RankControl
from quorate.errors import CheckpointError
from quorate.machine.regular_file import open_regular
from quorate.replica.digest import flat_bytes
from quorate.replica.flat import Section
from quorate.services.checkpoints import tensor_file
from quorate.services.checkpoints.tensor_bytes import read_at
from quorate.training.collective.rows import Part, Row, Rows, chunks, in_turns
from quorate.training.optimizing.entries import Listing, in_memory_order
from quorate.training.optimizing.slice_state import SliceState


class Unread(NamedTuple):
    """The file of an optimizer's state, not read yet."""

    path: Path

    def rows(self, listing: Listing) -> list[Row]:
        """Return the places in the file of the entries with a value per element.

        Args:
            listing: all entries, by parameter; see ``entries``.

        Raises:
            CheckpointError: the file cannot be read.
        """
        with _readable(self.path):
            stored = tensor_file.header(self.path).tensors
        found = [(name, entry) for name, entry, dtype, _ in listing if dtype is not None]
        return [
            Row(name, entry, stored[f"{entry}.{name}"].dtype, stored[f"{entry}.{name}"].start)
            for name, entry in found
        ]

    def mark(self) -> str:
        """Return a hash of the file's header; the record's checksum in the header makes it unique.

        Raises:
            CheckpointError: the file cannot be read.
        """
        with _readable(self.path), open_regular(self.path) as file:
            length = int.from_bytes(file.read(8), "little")
            return hashlib.sha256(file.read(min(length, tensor_file.MOST_HEADER_BYTES))).hexdigest()


def sees(path: Path, mark: str) -> bool:
    """Return whether this rank sees the same file as rank 0, by rank 0's ``mark`` of the file."""
    try:
        return Unread(path).mark() == mark
    except CheckpointError:
        return False


def read(
    ranks: RankControl, own: SliceState, rows: Rows, path: Path, reads: Sequence[bool]
) -> None:
    """Read this rank's part of some rows into its state. All ranks call. Blocks.

    Args:
        own: the state of this rank's slice.
        rows: the rows to read.
        path: path of the file.
        reads: whether each rank sees the file, by rank.

    Raises:
        CheckpointError: the file cannot be read.
    """
    me, entries = ranks.rank, own.state()
    with _opened(path if reads[me] else None) as file:
        # 1. Read the part of this rank, if this rank sees the file.
        if reads[me]:
            for part in rows.parts(me):
                read_at(file, part.of(entries), part.at)
            for part in rows.of(me, rows.strided):
                part.of(entries).copy_(_by_memory(file, part, rows.sections[part.row.name]))
        ranks.arrive()  # a disk may be much slower, and exchanges have a time limit
        # 2. Read on rank 0, and send, the parts of ranks that do not see the file.
        blind = [r for r in range(ranks.size) if not reads[r] and (ranks.leads or r == me)]
        for rank, chunk in in_turns({rank: chunks(rows.parts(rank)) for rank in blind}):
            sizes = [part.nbytes for part in chunk]
            data = torch.empty(sum(sizes), dtype=torch.uint8, device=ranks.device)
            pieces = torch.split(data, sizes)
            if ranks.leads:
                for part, piece in zip(chunk, pieces, strict=True):
                    read_at(file, piece, part.at)
                ranks.swap([(rank, data)], [])
            else:
                ranks.swap([], [(0, data)])
                for part, piece in zip(chunk, pieces, strict=True):
                    flat_bytes(part.of(entries)).copy_(piece)
        odd = {rank: rows.of(rank, rows.strided) for rank in blind}
        for rank, part in in_turns(odd):
            if ranks.leads:
                values = _by_memory(file, part, rows.sections[part.row.name]).to(ranks.device)
                ranks.swap([(rank, flat_bytes(values))], [])
            else:
                ranks.swap([], [(0, flat_bytes(part.of(entries)))])
        ranks.arrive()


def read_whole(path: Path, row: Row, into: torch.Tensor) -> None:
    """Read an entry of a parameter into memory with any strides.

    Raises:
        CheckpointError: the file cannot be read.
    """
    with _opened(path) as file:
        data = torch.empty(into.shape, dtype=into.dtype)
        read_at(file, data, row.start)
        into.copy_(data)


def _by_memory(file: int, part: Part, section: Section) -> torch.Tensor:
    """Return a part in the order of memory, of a parameter not stored row by row in memory."""
    dtype = getattr(torch, part.row.dtype)
    by_rows = torch.empty(section.shape, dtype=dtype)
    read_at(file, by_rows, part.row.start)
    memory = torch.empty_strided(section.shape, section.stride, dtype=dtype).copy_(by_rows)
    return in_memory_order(memory)[part.piece.start : part.piece.stop]


@contextmanager
def _opened(path: Path | None) -> Iterator[int]:
    """Open a file inside the block, and yield the descriptor; -1 without a path."""
    if path is None:
        yield -1
        return
    with _readable(path), open_regular(path) as file:
        yield file.fileno()


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Replace a read error in the block by an error of one line.

    Raises:
        CheckpointError: the block raised OSError or EOFError.
    """
    try:
        yield
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(path, reason, fix="start again, others may be sound") from error
