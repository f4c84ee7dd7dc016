"""Filling a file: all ranks write their parts of the optimizer's state into the same file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import torch

from quorate.engines.collective.rank_control import RankControl
from quorate.machine import this_host
from quorate.replica.digest import flat_bytes
from quorate.replica.flat import Section
from quorate.services.checkpoints.tensor_bytes import write_at
from quorate.training.collective.rows import OPTIMIZER, Part, Row, chunks, in_turns, parts
from quorate.training.optimizing.cut_optimizer import CutOptimizer
from quorate.training.optimizing.runs import Run, is_by_rows


def fill(
    ranks: RankControl,
    optimizer: CutOptimizer,
    folder: Path,
    rows: Sequence[Row],
    writes: Sequence[bool],
) -> tuple[File, list[tuple[int, str]]]:
    """Write this rank's part of some rows, or send the part to rank 0. All ranks call. Blocks.

    Args:
        folder: directory of the file; the file exists at full size.
        rows: the rows to write; the same on all ranks.
        writes: whether each rank can write to the file, by rank.

    Returns:
        The file, and the errors of all ranks for ``require_done``; the same errors on all ranks.
    """
    me, layout = ranks.rank, optimizer.flat_parameters.layout
    sections = [[layout.sections[name] for name in names] for names in optimizer.held]
    file = File(folder / OPTIMIZER)
    # Cached by tensor and rank, because the entries of a tensor have the same runs.
    found = cache(optimizer.runs_of)

    def runs_of(rank: int) -> Callable[[Row], list[Run]]:
        return lambda row: found(row.number, rank)

    def values(part: Part) -> torch.Tensor:
        whole = optimizer.values_of(part.row.number, part.row.entry)[part.run.piece]
        return whole[part.run.start : part.run.start + part.run.length]

    # 1. Write from this rank: whole blocks of the file; rank 0 also writes parts of blocks.
    if writes[me]:
        own = parts(rows, runs_of(me), sections, blocks=True, beside=ranks.leads)
        for part in own:
            file.write(values(part), part.at)
    ranks.arrive()  # a disk may be much slower, and exchanges have a time limit
    # 2. Send to rank 0: parts of blocks, and everything from ranks that cannot write.
    theirs = {
        rank: chunks(
            parts(rows, runs_of(rank), sections, blocks=not writes[rank], beside=True),
        )
        for rank in (range(1, ranks.size) if ranks.leads else [me])
    }
    for rank, chunk in in_turns(theirs):
        if not ranks.leads:
            ranks.swap([(0, torch.cat([flat_bytes(values(part)) for part in chunk]))], [])
            continue
        sizes = [part.nbytes for part in chunk]
        taken = torch.empty(sum(sizes), dtype=torch.uint8, device=ranks.device)
        ranks.swap([], [(rank, taken)])
        for part, piece in zip(chunk, torch.split(taken, sizes), strict=True):
            file.write(piece, part.at)
    # 3. Collect on rank 0, by parameter, the entries not stored row by row in memory.
    for row in rows:
        for which, section in enumerate(sections[row.number]):
            if not is_by_rows(section):
                whole = _whole(ranks, row, which, section, runs_of, values)
                if ranks.leads:
                    file.write(whole.as_strided(section.shape, section.stride), row.starts[which])
    ranks.arrive()
    nbytes = sum(_numel(s) * row.itemsize for row in rows for s in sections[row.number])
    return file, _wrong(ranks, file, nbytes)


def _whole(
    ranks: RankControl,
    row: Row,
    which: int,
    section: Section,
    runs_of: Callable[[int], Callable[[Row], list[Run]]],
    values: Callable[[Part], torch.Tensor],
) -> torch.Tensor:
    """Return an entry of a parameter in the order of memory; empty except on rank 0. Blocks."""
    numel = _numel(section) if ranks.leads else 0
    whole = torch.empty(numel, dtype=getattr(torch, row.dtype), device=ranks.device)
    for rank in range(ranks.size) if ranks.leads else [ranks.rank]:
        for run in runs_of(rank)(row):
            if run.name != which:
                continue
            if not ranks.leads:
                ranks.swap([(0, flat_bytes(values(Part(row, run, 0))))], [])
                continue
            there = whole[run.at : run.at + run.length]
            if rank == 0:
                there.copy_(values(Part(row, run, 0)))
            else:
                ranks.swap([], [(rank, flat_bytes(there))])
    return whole


def _numel(section: Section) -> int:
    return torch.Size(section.shape).numel()


class File:
    """A file open for writing. After the first error nothing more is written.

    All ranks wait for tensors from each other, so a rank reports an error only after all exchanges.

    Attributes:
        error: the first error; None without an error.
    """

    def __init__(self, path: Path) -> None:
        self.error: OSError | None = None
        self.nbytes = 0  # bytes written so far
        self._path = path
        self._stack = ExitStack()
        self._descriptor: int | None = None

    def write(self, values: torch.Tensor, at: int) -> None:
        """Write the elements of a tensor to the file, from byte ``at`` on."""
        if self.error is not None:
            return
        try:
            if self._descriptor is None:
                opened = self._stack.enter_context(self._path.open("r+b", buffering=0))
                self._descriptor = opened.fileno()
            write_at(self._descriptor, values, at)
            self.nbytes += values.nbytes
        except OSError as error:
            self.error = error

    def flush(self) -> None:
        """Flush the file to disk, and close the file."""
        try:
            if self._descriptor is not None:
                os.fsync(self._descriptor)
            self.close()
        except OSError as error:  # some systems report a full disk only now
            self.error = error

    def close(self) -> None:
        """Close the file."""
        self._stack.close()


def answer(rank: int, error: Exception | None, nbytes: int = 0) -> dict[str, Any]:
    """Return the message of a rank after its work: the bytes written, and the error if any."""
    told: dict[str, Any] = {"nbytes": nbytes}
    if error is not None:
        why = getattr(error, "strerror", None) or error
        number = getattr(error, "errno", None) or errno.EIO
        told |= {"error": f"rank {rank} on {this_host.name()}: {why}", "errno": number}
    return told


def require_done(wrong: Sequence[tuple[int, str]], path: Path) -> None:
    """Raise the first of some errors, if there is any.

    Raises:
        OSError: the error of the lowest rank with an error.
    """
    for number, text in wrong:
        raise OSError(number, text, str(path))


def wrong_in(answers: Sequence[dict[str, Any]]) -> list[tuple[int, str]]:
    """Return the errors of ranks as pairs of errno and text, for ``require_done``."""
    return [(each["errno"], each["error"]) for each in answers if "error" in each]


def _wrong(ranks: RankControl, file: File, nbytes: int) -> list[tuple[int, str]]:
    """Return the errors of all ranks, or an error if ranks have not written all bytes. Blocks."""
    answers = ranks.gather(answer(ranks.rank, file.error, file.nbytes))
    if wrong := wrong_in(answers):
        return wrong
    written = sum(each["nbytes"] for each in answers)
    if written == nbytes:
        return []
    return [(errno.EIO, f"ranks have written {written:,} bytes of {nbytes:,}")]
