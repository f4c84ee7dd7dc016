"""Reading a checkpoint's file: each rank reads a part of the optimizer's state.

A rank that sees the file reads its stretches of the file. For each of the other ranks, rank 0
reads the stretches and sends them, piece by piece.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
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
from quorate.training.collective.rows import Part, Row, chunks, in_turns, parts
from quorate.training.optimizing.cut_optimizer import CutOptimizer
from quorate.training.optimizing.runs import Run, is_by_rows


class Unread(NamedTuple):
    """The file of an optimizer's state, not read yet."""

    path: Path

    def rows(self, held: Sequence[Sequence[str]], entries: Sequence[tuple[int, str]]) -> list[Row]:
        """Return the places of some entries of the optimizer's tensors in the file.

        Args:
            held: the names of the parameters in each tensor.
            entries: pairs of a tensor's number and the name of an entry.

        Raises:
            CheckpointError: the file cannot be read.
        """
        with _readable(self.path):
            stored = tensor_file.header(self.path).tensors
        return [
            Row(
                number,
                entry,
                stored[f"{entry}.{held[number][0]}"].dtype,
                [stored[f"{entry}.{name}"].start for name in held[number]],
            )
            for number, entry in entries
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
    ranks: RankControl,
    optimizer: CutOptimizer,
    path: Path,
    rows: Sequence[Row],
    reads: Sequence[bool],
) -> None:
    """Read this rank's part of some rows into the optimizer. All ranks call. Blocks.

    Args:
        rows: the rows to read; the same on all ranks.
        reads: whether each rank sees the file, by rank.

    Raises:
        CheckpointError: the file cannot be read.
    """
    me, layout = ranks.rank, optimizer.flat_parameters.layout
    sections = [[layout.sections[name] for name in names] for names in optimizer.held]
    found = cache(optimizer.runs_of)

    def runs_of(rank: int) -> Callable[[Row], list[Run]]:
        return lambda row: found(row.number, rank)

    def into(row: Row, run: Run) -> torch.Tensor:
        whole = optimizer.values_of(row.number, row.entry)[run.piece]
        return whole[run.start : run.start + run.length]

    def strided(rank: int) -> Iterator[tuple[Row, Run, Section]]:
        for row in rows:
            for run in runs_of(rank)(row):
                section = sections[row.number][run.name]
                if not is_by_rows(section):
                    yield row, run, section

    def all_parts(rank: int) -> Iterator[Part]:
        return parts(rows, runs_of(rank), sections, blocks=True, beside=True)

    with _opened(path if reads[me] else None) as file:
        # 1. Read the part of this rank, if this rank sees the file.
        if reads[me]:
            for part in all_parts(me):
                read_at(file, into(part.row, part.run), part.at)
            for row, run, section in strided(me):
                into(row, run).copy_(_by_memory(file, row, run, section))
        ranks.arrive()  # a disk may be much slower, and exchanges have a time limit
        # 2. Read on rank 0, and send, the parts of ranks that do not see the file.
        blind = [r for r in range(ranks.size) if not reads[r] and (ranks.leads or r == me)]
        for rank, chunk in in_turns({rank: chunks(all_parts(rank)) for rank in blind}):
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
                    flat_bytes(into(part.row, part.run)).copy_(piece)
        for rank, (row, run, section) in in_turns({rank: strided(rank) for rank in blind}):
            if ranks.leads:
                own = _by_memory(file, row, run, section).to(ranks.device)
                ranks.swap([(rank, flat_bytes(own))], [])
            else:
                ranks.swap([], [(0, flat_bytes(into(row, run)))])
        ranks.arrive()


def read_whole(path: Path, row: Row, section: Section, which: int, into: torch.Tensor) -> None:
    """Read an entry of a parameter into memory with any strides.

    Raises:
        CheckpointError: the file cannot be read.
    """
    with _opened(path) as file:
        data = torch.empty(section.shape, dtype=getattr(torch, row.dtype))
        read_at(file, data, row.starts[which])
        into.copy_(data)


def _by_memory(file: int, row: Row, run: Run, section: Section) -> torch.Tensor:
    """Return a run in the order of memory, of a parameter not stored row by row in memory."""
    dtype = getattr(torch, row.dtype)
    by_rows = torch.empty(section.shape, dtype=dtype)
    read_at(file, by_rows, row.starts[run.name])
    memory = torch.empty(by_rows.numel(), dtype=dtype)
    memory.as_strided(section.shape, section.stride).copy_(by_rows)
    return memory[run.at : run.at + run.length]


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
