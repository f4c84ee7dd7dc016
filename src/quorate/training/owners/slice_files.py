"""The state of all owners, moved between their slices and a whole: a file, or memory of rank 0.

Owners are ranks or servers. Slices are stretches of vectors, so an owner's part of an entry of a
parameter is a stretch of the whole entry. In a file the exception is a parameter not stored row by
row in memory (channels_last, for example): such an entry is moved by way of the leader's memory.

1. Each owner that sees the file moves the whole blocks of its own stretches.
2. Rank 0, or the coordinator of servers, moves the rest, and all stretches of owners that do not
   see the file: owners send their values, or receive them, piece by piece.

Memory of this process is seen by no owner: values travel from and to their places in memory.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from quorate.engines.partition import Partition, Piece
from quorate.errors import CheckpointError
from quorate.machine import this_host
from quorate.machine.regular_file import open_regular
from quorate.replica.flat import Layout, Section
from quorate.services.checkpoints import tensor_file
from quorate.services.checkpoints.files import readable
from quorate.services.checkpoints.tensor_bytes import read_at, write_at
from quorate.services.checkpoints.tensor_file import Stored
from quorate.training.optimizing.entries import Entries, Listing, in_memory_order

OPTIMIZER = "optimizer.safetensors"
CPU = torch.device("cpu")

# Bytes of parameters above which the state is not gathered on rank 0. With Adam, gathering takes
# five times as much: twice for the moments, and three times for a copy of everything, so that
# training continues. Up to this limit, gathering takes less memory than a process with torch
# imported (0.3 GiB).
GATHERED_BYTES = 64 << 20

# Clients of a network file system that write to the same page may undo each other's writes, and no
# page is larger than a block. So each block of the file has a single writer.
BLOCK_BYTES = 1 << 16
OTHERS = "start again, others may be sound"  # the cure for a damaged checkpoint
PIECE_BYTES = 4 << 20  # size of a transfer; the leader has memory for a transfer of each owner


def is_large(layout: Layout) -> bool:
    """Return whether the state of parameters is too large for a single rank."""
    return layout.nbytes > GATHERED_BYTES


class Row(NamedTuple):
    """An entry of a parameter's state, with a value per element, and its place in the file."""

    name: str  # of the parameter
    entry: str
    dtype: str
    start: int = 0  # bytes from the beginning of the file, if there is one

    @property
    def itemsize(self) -> int:
        """The size of an element, in bytes."""
        size: int = getattr(torch, self.dtype).itemsize
        return size


def rows_of(
    listing: Listing, stored: Mapping[str, Stored] | None = None, prefix: str = ""
) -> list[Row]:
    """Return the entries with a value per element, and their places in a file, if there is one.

    Args:
        listing: all entries of an optimizer, by parameter; see ``entries``.
        stored: positions of the tensors in the file.
        prefix: prefix of the optimizer's tensors in the file.
    """
    rows = [Row(name, entry, dtype) for name, entry, dtype, _ in listing if dtype is not None]
    if stored is None:
        return rows
    places = [stored[f"{prefix}{row.entry}.{row.name}"] for row in rows]
    return [
        row._replace(dtype=place.dtype, start=place.start)
        for row, place in zip(rows, places, strict=True)
    ]


class RowPart(NamedTuple):
    """A stretch of an entry that one rank has."""

    row: Row
    piece: Piece  # the rank's piece with the stretch
    start: int  # offset in the piece
    length: int
    at: int  # bytes from the beginning of the file; of no meaning in memory

    @property
    def nbytes(self) -> int:
        """The size of the stretch, in bytes."""
        return self.length * self.row.itemsize

    def of(self, entries: Entries) -> torch.Tensor:
        """Return the stretch in the state of the rank's pieces, as a view."""
        piece: torch.Tensor = entries[self.piece.key][self.row.entry]
        return piece[self.start : self.start + self.length]

    def of_whole(self, entries: Entries) -> torch.Tensor:
        """Return the stretch in the state of whole parameters, as a view."""
        whole = in_memory_order(entries[self.row.name][self.row.entry])
        start = self.piece.start + self.start
        return whole[start : start + self.length]


def is_by_rows(section: Section) -> bool:
    """Return whether a parameter's elements lie row by row in memory, as in files."""
    expected = 1
    for size, stride in zip(reversed(section.shape), reversed(section.stride), strict=True):
        if size != 1 and stride != expected:
            return prod(section.shape) == 0
        expected *= size
    return True


class Rows(NamedTuple):
    """The rows to write or read, and the parts of each rank."""

    rows: Sequence[Row]  # the same on all ranks
    partition: Partition  # of the parameters among the ranks

    @property
    def nbytes(self) -> int:
        """The size of all rows, in bytes."""
        sections = self.partition.whole.sections
        return sum(prod(sections[row.name].shape) * row.itemsize for row in self.rows)

    def parts(self, rank: int, *, blocks: bool = True, beside: bool = True) -> Iterator[RowPart]:
        """Yield a rank's parts.

        Args:
            rank: the rank.
            blocks: whether to yield whole blocks of the file.
            beside: whether to yield parts of blocks, which ranks may share.
        """
        pieces = self.partition.by_name(rank)
        own = ((row, piece) for row in self.rows for piece in pieces.get(row.name, ()))
        for row, piece in own:
            size = row.itemsize
            begin = row.start + piece.start * size
            end = begin + piece.length * size
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
                    yield RowPart(row, piece, (at - begin) // size, length, at)


def chunks(of: Iterable[RowPart]) -> Iterator[list[RowPart]]:
    """Yield lists of parts to send together, of ``PIECE_BYTES`` at most in all."""
    chunk: list[RowPart] = []
    nbytes = 0
    for part in of:
        if chunk and nbytes + part.nbytes > PIECE_BYTES:
            yield chunk
            chunk, nbytes = [], 0
        chunk.append(part)
        nbytes += part.nbytes
    if chunk:
        yield chunk


class StateInMemory(NamedTuple):
    """All entries of an optimizer, in memory of this process: parts are moved in place."""

    entries: Entries
    is_read: bool  # whether values move from here to the owners
    path: None = None
    error: None = None
    nbytes: int = 0

    def begin(self, part: RowPart) -> torch.Tensor:
        """Return the place of a part: a view."""
        return part.of_whole(self.entries)

    def end(self, part: RowPart, values: torch.Tensor) -> None:
        """Do nothing: the values are in place."""

    def close(self) -> None:
        """Do nothing."""


class StateFile:
    """A file of all entries, opened with the first move. Close the object at the end.

    Owners send values meanwhile, so an error of writing is reported at the end: after the first
    error nothing more is written. Reading raises at once.

    Args:
        path: of the file; the file exists at full size.
        device: of the values that ``begin`` and ``entry`` return.
        is_read: whether values move from the file to memory.

    Attributes:
        path, is_read: as passed.
        error: the first error of writing; None without an error.
        nbytes: bytes moved so far.
    """

    def __init__(self, path: Path, device: torch.device = CPU, *, is_read: bool) -> None:
        self.error: OSError | None = None
        self.nbytes = 0
        self.path, self.is_read = path, is_read
        self._device = device
        self._stack = ExitStack()
        self._descriptor: int | None = None

    def move(self, values: torch.Tensor, part: RowPart | Row) -> None:
        """Write the elements of a part or of a whole entry to the file, or read them.

        Args:
            values: the elements, or their bytes; contiguous if they are read.

        Raises:
            CheckpointError: the file cannot be read.
        """
        at = part.at if isinstance(part, RowPart) else part.start
        if self.is_read:
            with readable(self.path, OTHERS):
                read_at(self._opened(), values, at)
            return
        if self.error is not None:
            return
        try:
            write_at(self._opened(), values, at)
            self.nbytes += values.nbytes
        except OSError as error:
            self.error = error

    def begin(self, part: RowPart) -> torch.Tensor:
        """Return memory for the values of a part; with its values, if values are read.

        Raises:
            CheckpointError: the file cannot be read.
        """
        dtype = getattr(torch, part.row.dtype)
        values = torch.empty(part.length, dtype=dtype, device=self._device)
        if self.is_read:
            self.move(values, part)
        return values

    def end(self, part: RowPart, values: torch.Tensor) -> None:
        """Write a part, if values are written."""
        if not self.is_read:
            self.move(values, part)

    @contextmanager
    def entry(self, row: Row, section: Section) -> Iterator[StateInMemory]:
        """Have a whole entry in memory inside the block; read before the block, or written after.

        Raises:
            CheckpointError: the file cannot be read.
        """
        by_rows = torch.empty(section.shape, dtype=getattr(torch, row.dtype))
        if self.is_read:
            self.move(by_rows, row)
        values = torch.empty_strided(section.shape, section.stride, dtype=by_rows.dtype)
        values = values.copy_(by_rows).to(self._device)
        yield StateInMemory({row.name: {row.entry: values}}, self.is_read)
        if not self.is_read:
            self.move(values, row)

    def _opened(self) -> int:
        if self._descriptor is None:
            opened = self.path.open("r+b", buffering=0) if not self.is_read else None
            file = self._stack.enter_context(opened or open_regular(self.path))
            self._descriptor = file.fileno()
        return self._descriptor

    def flush(self) -> None:
        """Flush the file to disk, and close the file.

        Raises:
            OSError: the file cannot be flushed; some systems report a full disk only now.
        """
        with closing(self):
            if self._descriptor is not None:
                os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        self._descriptor = None
        self._stack.close()


WholeState = StateFile | StateInMemory
Flags = Sequence[bool] | None  # whether each owner moves blocks of a file itself
OwnerValues = Sequence[Sequence[torch.Tensor]]  # by owner


def named(error: Exception, who: str, folder: Path) -> OSError:
    """Return an error of writing with the names of the process and its host.

    Args:
        who: the process in words.
        folder: of the files.
    """
    why = getattr(error, "strerror", None) or error
    number = getattr(error, "errno", None) or errno.EIO
    return OSError(number, f"{who} on {this_host.name()}: {why}", str(folder))


def rows_in(path: Path, listing: Listing, prefix: str) -> list[Row]:
    """Return the places in a checkpoint's file of the entries with a value per element.

    Args:
        listing, prefix: see ``rows_of``.

    Raises:
        CheckpointError: the file cannot be read.
    """
    with readable(path, OTHERS):
        return rows_of(listing, tensor_file.header(path).tensors, prefix)


def mark(path: Path) -> str:
    """Return a hash of a file's header; the record's checksum in the header makes the hash unique.

    Raises:
        CheckpointError: the file cannot be read.
    """
    with readable(path, OTHERS), open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        return hashlib.sha256(file.read(min(length, tensor_file.MOST_HEADER_BYTES))).hexdigest()


def sees(path: Path, first_mark: str) -> bool:
    """Return whether this rank sees the same file as rank 0, by rank 0's ``mark`` of the file."""
    try:
        return mark(path) == first_mark
    except CheckpointError:
        return False


def place_of(owner: int) -> int:
    """Return the place of an owner's signature in a token file, in bytes; block 0 has the token."""
    return (1 + owner) * BLOCK_BYTES


def sign(path: Path, token: bytes, who: str, owner: int) -> str:
    """Sign the token file of the process that saves; return the reason for a failure, if any.

    Args:
        who: the owner in words.
        owner: the number of the owner.
    """
    who = f"{who} on {this_host.name()}"
    try:
        with path.open("r+b", buffering=0) as file:
            if file.read(len(token)) != token:
                return f"{who} sees another file there"
            file.seek(place_of(owner))
            file.write(token[::-1])
            os.fsync(file.fileno())
    except FileNotFoundError:
        return f"{who} does not see it"
    except OSError as error:
        return f"{who} cannot write there: {error.strerror}"
    return ""
