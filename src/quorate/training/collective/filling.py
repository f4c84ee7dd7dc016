"""Filling a file: all ranks write their parts of the optimizer's state into the same file."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from quorate.engines.collective.rank_control import RankControl
from quorate.machine import this_host
from quorate.replica.digest import flat_bytes
from quorate.replica.flat import Section
from quorate.services.checkpoints.tensor_bytes import write_at
from quorate.training.collective.rows import OPTIMIZER, Rows, chunks, in_turns
from quorate.training.optimizing.slice_state import SliceState


def fill(
    ranks: RankControl,
    own: SliceState,
    folder: Path,
    rows: Rows,
    writes: Sequence[bool],
) -> tuple[File, list[tuple[int, str]]]:
    """Write this rank's part of some rows, or send the part to rank 0. All ranks call. Blocks.

    Args:
        own: the state of this rank's slice.
        folder: directory of the file; the file exists at full size.
        rows: the rows to write.
        writes: whether each rank can write to the file, by rank.

    Returns:
        The file, and the errors of all ranks for ``require_done``; the same errors on all ranks.
    """
    me, entries, file = ranks.rank, own.state(), File(folder / OPTIMIZER)
    # 1. Write from this rank: whole blocks of the file; rank 0 also writes parts of blocks.
    if writes[me]:
        for part in rows.parts(me, beside=ranks.leads):
            file.write(part.of(entries), part.at)
    ranks.arrive()  # a disk may be much slower, and exchanges have a time limit
    # 2. Send to rank 0: parts of blocks, and everything from ranks that cannot write.
    theirs = {
        rank: chunks(rows.parts(rank, blocks=not writes[rank]))
        for rank in (range(1, ranks.size) if ranks.leads else [me])
    }
    for rank, chunk in in_turns(theirs):
        if not ranks.leads:
            ranks.swap([(0, torch.cat([flat_bytes(part.of(entries)) for part in chunk]))], [])
            continue
        sizes = [part.nbytes for part in chunk]
        taken = torch.empty(sum(sizes), dtype=torch.uint8, device=ranks.device)
        ranks.swap([], [(rank, taken)])
        for part, piece in zip(chunk, torch.split(taken, sizes), strict=True):
            file.write(piece, part.at)
    # 3. Collect on rank 0 the entries not stored row by row in memory.
    for row in rows.strided:
        section = rows.sections[row.name]
        numel = _numel(section) if ranks.leads else 0
        whole = torch.empty(numel, dtype=getattr(torch, row.dtype), device=ranks.device)
        for rank in range(ranks.size) if ranks.leads else [me]:
            for part in rows.of(rank, [row]):
                there = whole[part.piece.start : part.piece.stop]
                if not ranks.leads:
                    ranks.swap([(0, flat_bytes(part.of(entries)))], [])
                elif rank == 0:
                    there.copy_(part.of(entries))
                else:
                    ranks.swap([], [(rank, flat_bytes(there))])
        if ranks.leads:
            file.write(whole.as_strided(section.shape, section.stride), row.start)
    ranks.arrive()
    nbytes = sum(_numel(rows.sections[row.name]) * row.itemsize for row in rows.rows)
    return file, _wrong(ranks, file, nbytes)


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
