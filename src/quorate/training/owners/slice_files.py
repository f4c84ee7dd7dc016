"""The state of all owners, moved between their slices and a whole: a file, or memory of rank 0.

Owners are ranks or servers. Slices are stretches of vectors, so an owner's part of an entry of a
parameter is a stretch of the whole entry. In a file the exception is a parameter not stored row by
row in memory (channels_last, for example).

1. Each owner that sees the file moves the whole blocks of its own stretches.
2. Rank 0, or the coordinator of servers, moves the rest, and all stretches of owners that do not
   see the file: owners send their values, or receive them, piece by piece.

Memory of rank 0 is seen by no other rank: values travel from and to their places in memory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, zip_longest
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from quorate.engines.collective.rank_control import RankControl
from quorate.engines.partition import Partition, Piece
from quorate.errors import CheckpointError
from quorate.machine import this_host
from quorate.machine.regular_file import open_regular
from quorate.replica.digest import flat_bytes
from quorate.replica.flat import Layout, Section
from quorate.services.checkpoints import tensor_file
from quorate.services.checkpoints.files import readable
from quorate.services.checkpoints.tensor_bytes import read_at, write_at
from quorate.services.checkpoints.tensor_file import Stored
from quorate.training.optimizing.entries import Entries, Listing, in_memory_order
from quorate.training.owners.slice_state import SliceState

OPTIMIZER = "optimizer.safetensors"

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


class Part(NamedTuple):
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
    def plain(self) -> Rows:
        """The rows of parameters stored row by row in memory."""
        sections = self.partition.whole.sections
        return self._replace(rows=[row for row in self.rows if is_by_rows(sections[row.name])])

    @property
    def strided(self) -> list[Row]:
        """All further rows."""
        sections = self.partition.whole.sections
        return [row for row in self.rows if not is_by_rows(sections[row.name])]

    def parts(self, rank: int, *, blocks: bool = True, beside: bool = True) -> Iterator[Part]:
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
                    yield Part(row, piece, (at - begin) // size, length, at)

    def rest(self, owner: int, *, sees: bool) -> Iterator[Part]:
        """Yield the parts that an owner does not move itself.

        Args:
            sees: whether the owner moves whole blocks of rows stored row by row.
        """
        yield from self.plain.parts(owner, blocks=not sees)
        yield from self.strided_parts(owner)

    def strided_parts(self, owner: int) -> Iterator[Part]:
        """Yield the parts of rows that are not stored row by row."""
        return self._replace(rows=self.strided).parts(owner)


def chunks(of: Iterable[Part]) -> Iterator[list[Part]]:
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


class StateFile:
    """A file of whole entries, opened with the first move. Close the object at the end.

    All ranks wait for tensors from each other, so a rank reports an error only after all exchanges:
    after the first error nothing more is written. Reading raises at once.

    Args:
        path: of the file; the file exists at full size.
        is_read: whether values move from the file to memory.

    Attributes:
        path, is_read: as passed.
        error: the first error of writing; None without an error.
        nbytes: bytes moved so far.
    """

    def __init__(self, path: Path, *, is_read: bool) -> None:
        self.error: OSError | None = None
        self.nbytes = 0
        self.path, self.is_read = path, is_read
        self._stack = ExitStack()
        self._descriptor: int | None = None

    def move(self, values: torch.Tensor, part: Part | Row) -> None:
        """Write the elements of a part or of a whole entry to the file, or read them.

        Args:
            values: the elements, or their bytes; contiguous if they are read.

        Raises:
            CheckpointError: the file cannot be read.
        """
        at = part.at if isinstance(part, Part) else part.start
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
        if self._descriptor is not None:
            os.fsync(self._descriptor)
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._stack.close()


def move_in_memory(
    ranks: RankControl, own: SliceState, rows: Rows, whole: Entries, *, is_read: bool
) -> None:
    """Move all ranks' parts of some rows between slices and memory of rank 0. Blocks.

    All ranks call.

    Args:
        own: the state of this rank's slice.
        rows: the rows to move.
        whole: the entries of whole parameters on rank 0.
        is_read: whether values move from the whole entries to the slices.
    """
    entries, addressed = own.state(), list[tuple[int, torch.Tensor]]()
    for rank in range(ranks.size) if ranks.leads else [ranks.rank]:
        for part in rows.parts(rank):
            if rank == 0:
                _copy(part.of(entries), part.of_whole(whole), to_first=is_read)
            elif ranks.leads:
                addressed.append((rank, flat_bytes(part.of_whole(whole))))
            else:
                addressed.append((0, flat_bytes(part.of(entries))))
    ranks.swap(*((addressed, []) if ranks.leads is is_read else ([], addressed)))


def move(
    ranks: RankControl, own: SliceState, rows: Rows, file: StateFile, sees: Sequence[bool]
) -> None:
    """Move all ranks' parts of some rows between slices and a file. All ranks call. Blocks.

    Args:
        own: the state of this rank's slice.
        rows: the rows to move.
        file: the file as this rank sees the file.
        sees: whether each rank reads or writes the file itself, by rank.

    Raises:
        CheckpointError: the file cannot be read.
    """
    entries, me = own.state(), ranks.rank
    # 1. On each rank that sees the file: whole blocks; rank 0 also moves parts of blocks.
    if sees[me]:
        for part in rows.plain.parts(me, beside=ranks.leads):
            file.move(part.of(entries), part)
    ranks.arrive()  # a disk may be much slower, and exchanges have a time limit

    def swap(rank: int, values: Iterable[torch.Tensor], *, sends: bool) -> None:
        addressed = [(rank, flat_bytes(value)) for value in values]
        ranks.swap(*((addressed, []) if sends else ([], addressed)))

    def exchange(each: Sequence[Sequence[Part]], values: Sequence[Sequence[torch.Tensor]]) -> None:
        for part, value in zip(each[0], values[0], strict=True):
            _copy(part.of(entries), value, to_first=file.is_read)
        for rank in range(1, ranks.size):
            if values[rank]:
                swap(rank, values[rank], sends=file.is_read)

    # 2. By rank 0: the rest, sent or received by the other ranks.
    if ranks.leads:
        rest = (rows.rest(rank, sees=sees[rank]) for rank in range(1, ranks.size))
        move_rest(rows, file, [rows.strided_parts(0), *rest], exchange, ranks.device)
    else:
        for chunk in chunks(rows.rest(me, sees=sees[me])):
            swap(0, (part.of(entries) for part in chunk), sends=not file.is_read)
    ranks.arrive()


def move_rest(
    rows: Rows,
    file: StateFile,
    rest: Iterable[Iterable[Part]],
    exchange: Callable[[Sequence[Sequence[Part]], Sequence[Sequence[torch.Tensor]]], None],
    device: torch.device,
) -> None:
    """Move parts that owners do not move themselves between a file and this process. Blocks.

    Args:
        rest: the parts, by owner; see ``Rows.rest``.
        exchange: receives, in turn, some parts of each owner and memory for their values, by owner.
            The function sends the values to the owners if the file is read, and fills the memory
            if the file is written.
        device: device of the values.

    Raises:
        CheckpointError: the file cannot be read.
    """
    strided = _StridedRows(rows, file, device)
    for each in zip_longest(*map(chunks, rest), fillvalue=list[Part]()):
        values = [[strided.place(part) for part in own] for own in each]
        pairs = zip(chain(*each), chain(*values), strict=True)
        plain = [(value, part) for part, value in pairs if not strided.has(part)]
        for value, part in plain if file.is_read else ():
            file.move(value, part)
        exchange(each, values)
        for value, part in () if file.is_read else plain:
            file.move(value, part)
        for part in filter(strided.has, chain(*each)):
            strided.end(part)


class _StridedRows:
    """Entries not stored row by row: whole in memory from the first of their parts to the last."""

    def __init__(self, rows: Rows, file: StateFile, device: torch.device) -> None:
        self._sections, self._file, self._device = rows.partition.whole.sections, file, device
        self._strided = {row.name for row in rows.strided}
        self._whole: dict[Row, torch.Tensor] = {}
        self._left: dict[Row, int] = {}  # elements whose parts have not been moved

    def has(self, part: Part) -> bool:
        """Return whether a part is of such an entry."""
        return part.row.name in self._strided

    def place(self, part: Part) -> torch.Tensor:
        """Return memory for the values of a part: its place in a whole entry, or new memory."""
        row, dtype = part.row, getattr(torch, part.row.dtype)
        if not self.has(part):
            return torch.empty(part.length, dtype=dtype, device=self._device)
        if row not in self._whole:
            shape, stride = self._sections[row.name].shape, self._sections[row.name].stride
            by_rows = torch.empty(shape, dtype=dtype)
            if self._file.is_read:
                self._file.move(by_rows, row)
            strided = torch.empty_strided(shape, stride, dtype=dtype).copy_(by_rows)
            self._whole[row], self._left[row] = strided.to(self._device), prod(shape)
        return part.of_whole({row.name: {row.entry: self._whole[row]}})

    def end(self, part: Part) -> None:
        """Note that a part has been moved. After the last part, the entry leaves memory."""
        row = part.row
        self._left[row] -= part.length
        if self._left[row] == 0:
            entry = self._whole.pop(row)
            if not self._file.is_read:
                self._file.move(entry, row)


def _copy(first: torch.Tensor, second: torch.Tensor, *, to_first: bool) -> None:
    target, source = (first, second) if to_first else (second, first)
    target.copy_(source)


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


def sign(path: Path, token: bytes, who: str, place: int) -> str:
    """Sign the token file of the process that saves; return the reason for a failure, if any.

    Args:
        who: the owner in words.
        place: number of the block for the signature.
    """
    who = f"{who} on {this_host.name()}"
    try:
        with path.open("r+b", buffering=0) as file:
            if file.read(len(token)) != token:
                return f"{who} sees another file there"
            file.seek(place * BLOCK_BYTES)
            file.write(token[::-1])
            os.fsync(file.fileno())
    except FileNotFoundError:
        return f"{who} does not see it"
    except OSError as error:
        return f"{who} cannot write there: {error.strerror}"
    return ""
