"""The file of an optimizer's state, which all ranks write or read at once.

Slices are stretches of vectors, so a rank's part of an entry of a parameter is a stretch of the
file. The exception is a parameter not stored row by row in memory (channels_last, for example).

1. Each rank that sees the file moves the whole blocks of its own stretches.
2. Rank 0 moves the rest, and all stretches of ranks that do not see the file: ranks send rank 0
   their values, or receive them, piece by piece.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from quorate.engines.collective.rank_control import RankControl
from quorate.engines.partition import Partition, Piece
from quorate.errors import CheckpointError
from quorate.machine import this_host
from quorate.machine.regular_file import open_regular
from quorate.replica.digest import flat_bytes
from quorate.replica.flat import Layout, Section
from quorate.services.checkpoints import tensor_file
from quorate.services.checkpoints.tensor_bytes import read_at, write_at
from quorate.services.checkpoints.tensor_file import Stored
from quorate.training.optimizing.entries import Entries, Listing, in_memory_order
from quorate.training.optimizing.slice_state import SliceState

T = TypeVar("T")
Trouble = tuple[int, str]  # of a rank: errno and text

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


def rows_of(stored: Mapping[str, Stored], listing: Listing, prefix: str) -> list[Row]:
    """Return the places in a file of the entries with a value per element.

    Args:
        stored: positions of the tensors in the file.
        listing: all entries of an optimizer, by parameter; see ``entries``.
        prefix: prefix of the optimizer's tensors in the file.
    """
    return [
        Row(name, entry, place.dtype, place.start)
        for name, entry, dtype, _ in listing
        if dtype is not None
        for place in [stored[f"{prefix}{entry}.{name}"]]
    ]


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


class StateFile:
    """A file, opened with the first move. Close the object at the end.

    All ranks wait for tensors from each other, so a rank reports an error only after all exchanges:
    after the first error nothing more is written. Reading raises at once.

    Args:
        path: of the file; the file exists at full size.
        is_read: whether values move from the file to memory.

    Attributes:
        error: the first error of writing; None without an error.
        nbytes: bytes moved so far.
    """

    def __init__(self, path: Path, *, is_read: bool) -> None:
        self.error: OSError | None = None
        self.nbytes = 0
        self.is_read = is_read
        self._path = path
        self._stack = ExitStack()
        self._descriptor: int | None = None

    def move(self, values: torch.Tensor, at: int) -> None:
        """Write a tensor's elements to the file from byte ``at`` on, or read a contiguous tensor.

        Raises:
            CheckpointError: the file cannot be read.
        """
        if self.is_read:
            with _readable(self._path):
                read_at(self._opened(), values, at)
            return
        if self.error is not None:
            return
        try:
            write_at(self._opened(), values, at)
            self.nbytes += values.nbytes
        except OSError as error:
            self.error = error

    def _opened(self) -> int:
        if self._descriptor is None:
            opened = self._path.open("r+b", buffering=0) if not self.is_read else None
            file = self._stack.enter_context(opened or open_regular(self._path))
            self._descriptor = file.fileno()
        return self._descriptor

    def flush(self) -> None:
        """Flush the file to disk, and close the file.

        Raises:
            OSError: the file cannot be flushed; some systems report a full disk only now.
        """
        if self._descriptor is not None:
            os.fsync(self._descriptor)
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._stack.close()

    def copy(self, own: torch.Tensor, transferred: torch.Tensor) -> None:
        """Copy values between memory of this rank and of a transfer, as the file's values move."""
        target, source = (own, transferred) if self.is_read else (transferred, own)
        target.copy_(source)


def move(
    ranks: RankControl, own: SliceState, rows: Rows, sees: Sequence[bool], file: StateFile
) -> None:
    """Move all ranks' parts of some rows between memory and a file. All ranks call. Blocks.

    Args:
        own: the state of this rank's slice.
        rows: the rows to move.
        sees: whether each rank reads or writes the file itself, by rank.
        file: of this rank.

    Raises:
        CheckpointError: the file cannot be read.
    """
    entries, sends = own.state(), ranks.leads is file.is_read
    # 1. On each rank that sees the file: whole blocks of the file; rank 0 also moves parts of
    # blocks.
    if sees[ranks.rank]:
        for part in rows.parts(ranks.rank, beside=ranks.leads):
            file.move(part.of(entries), part.at)
    ranks.arrive()  # a disk may be much slower, and exchanges have a time limit
    # 2. By rank 0: parts of blocks, and everything of ranks that do not see the file.
    theirs = {
        rank: chunks(rows.parts(rank, blocks=not sees[rank]))
        for rank in (range(1, ranks.size) if ranks.leads else [ranks.rank])
    }
    for rank, chunk in in_turns(theirs):
        sizes = [part.nbytes for part in chunk]
        data = torch.empty(sum(sizes), dtype=torch.uint8, device=ranks.device)
        if not sends:
            _carry(ranks, rank, data, sends=False)
        for part, piece in zip(chunk, torch.split(data, sizes), strict=True):
            if ranks.leads:
                file.move(piece, part.at)
            else:
                file.copy(flat_bytes(part.of(entries)), piece)
        if sends:
            _carry(ranks, rank, data, sends=True)
    # 3. By rank 0, by parameter: entries not stored row by row in memory.
    for row in rows.strided:
        _move_strided(ranks, entries, rows, row, file)
    ranks.arrive()


def _move_strided(
    ranks: RankControl, entries: Entries, rows: Rows, row: Row, file: StateFile
) -> None:
    section, dtype = rows.sections[row.name], getattr(torch, row.dtype)
    shape = section.shape if ranks.leads else [0]
    by_rows = torch.empty(shape, dtype=dtype)
    if ranks.leads and file.is_read:
        file.move(by_rows, row.start)
    whole = torch.empty_strided(shape, section.stride if ranks.leads else [1], dtype=dtype)
    whole = whole.copy_(by_rows).to(ranks.device)
    for rank in range(ranks.size) if ranks.leads else [ranks.rank]:
        for part in rows.of(rank, [row]):
            there = in_memory_order(whole)[part.piece.start : part.piece.stop]
            if rank == 0:
                file.copy(part.of(entries), there)
            else:
                mine = there if ranks.leads else part.of(entries)
                _carry(ranks, rank, flat_bytes(mine), sends=ranks.leads is file.is_read)
    if ranks.leads and not file.is_read:
        file.move(whole, row.start)


def _carry(ranks: RankControl, rank: int, data: torch.Tensor, *, sends: bool) -> None:
    """Send data of a rank between this rank and rank 0; the other of the two receives. Blocks."""
    addressed = [(rank if ranks.leads else 0, data)]
    ranks.swap(*((addressed, []) if sends else ([], addressed)))


# --- writing --------------------------------------------------------------------------------------


def fill(
    ranks: RankControl,
    states: Iterable[tuple[SliceState, Rows]],
    folder: Path,
    writes: Sequence[bool],
) -> tuple[StateFile, list[Trouble | None]]:
    """Write this rank's part of some rows, or send the part to rank 0. All ranks call. Blocks.

    Args:
        states: the state of this rank's slice and the rows to write, by optimizer.
        folder: directory of the file; the file exists at full size.
        writes: whether each rank can write to the file, by rank.

    Returns:
        The file, and the troubles of all ranks for ``require_done``; the same on all ranks.
    """
    file = StateFile(folder / OPTIMIZER, is_read=False)
    nbytes = 0
    for own, rows in states:
        move(ranks, own, rows, writes, file)
        nbytes += sum(prod(rows.sections[row.name].shape) * row.itemsize for row in rows.rows)
    found = ranks.gather([trouble(ranks.rank, file.error), file.nbytes])
    troubles, written = [each for each, _ in found], sum(nbytes for _, nbytes in found)
    if written != nbytes and not any(troubles):
        troubles[0] = errno.EIO, f"ranks have written {written:,} bytes of {nbytes:,}"
    return file, troubles


def trouble(rank: int, error: Exception | None) -> Trouble | None:
    """Return the errno and the text of an error on a rank, as a message; None without an error."""
    if error is None:
        return None
    why = getattr(error, "strerror", None) or error
    number = getattr(error, "errno", None) or errno.EIO
    return number, f"rank {rank} on {this_host.name()}: {why}"


def require_done(troubles: Sequence[Trouble | None], path: Path) -> None:
    """Raise the trouble of the lowest rank with a trouble, if there is any.

    Raises:
        OSError: a rank has a trouble.
    """
    for number, text in filter(None, troubles):
        raise OSError(number, text, str(path))


# --- reading --------------------------------------------------------------------------------------


def rows_in(path: Path, listing: Listing, prefix: str) -> list[Row]:
    """Return the places in a checkpoint's file of the entries with a value per element.

    Args:
        listing, prefix: see ``rows_of``.

    Raises:
        CheckpointError: the file cannot be read.
    """
    with _readable(path):
        return rows_of(tensor_file.header(path).tensors, listing, prefix)


def mark(path: Path) -> str:
    """Return a hash of a file's header; the record's checksum in the header makes the hash unique.

    Raises:
        CheckpointError: the file cannot be read.
    """
    with _readable(path), open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        return hashlib.sha256(file.read(min(length, tensor_file.MOST_HEADER_BYTES))).hexdigest()


def sees(path: Path, first_mark: str) -> bool:
    """Return whether this rank sees the same file as rank 0, by rank 0's ``mark`` of the file."""
    try:
        return mark(path) == first_mark
    except CheckpointError:
        return False


def read(
    ranks: RankControl, own: SliceState, rows: Rows, path: Path, reads: Sequence[bool]
) -> None:
    """Read this rank's part of some rows into the state of its slice. All ranks call. Blocks.

    Args:
        own: the state of this rank's slice.
        rows: the rows to read.
        path: path of the file.
        reads: whether each rank sees the file, by rank.

    Raises:
        CheckpointError: the file cannot be read.
    """
    with closing(StateFile(path, is_read=True)) as file:
        move(ranks, own, rows, reads, file)


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
