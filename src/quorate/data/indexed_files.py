"""Files without a table of contents, as map-style datasets: any row by number, through an index.

The index of FILE is built once, and stored as .FILE.index in the same folder, or under QUORATE_DATA
if the folder is not writable. An index belongs to a path, a size and a modification time, and has a
checksum: after a change of the file, or damage to the index, a new index is built.

An index is a few named arrays. The arrays are read into memory, not mapped: the system kills a
process that reads from a mapped file after the file was truncated. A checksum also does not prove
that quorate wrote an index, so each kind of file compares the arrays with the size of the file
before using the arrays.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from quorate.data import crc32c
from quorate.errors import DataError
from quorate.machine.atomic_file import write_atomically
from quorate.machine.environment import cache_dir
from quorate.machine.regular_file import open_regular, regular_descriptor

# Magic; size and modification time of the file; bytes of the header; CRC-32C of the rest. An index
# of records has a single array, and the number of records instead of a header size.
_TOP = struct.Struct("<16sqqqI")
_ARRAYS, _RECORDS = b"quorate-arrays2\n", b"quorate-index-1\n"
_ALIGNMENT = 64
_PIECE_BYTES = 1 << 22
_MOST_HEAD_BYTES = 4096
_MOST_TIMES = 16  # largest index, as a multiple of its file: 8 for lines of one byte, 1 for tars

Arrays = Mapping[str, NDArray[Any]]
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}


@dataclass(frozen=True)
class Kind:
    """A kind of file without a table of contents, and the arrays of the index.

    Args:
        name: name for messages; the last word but one is part of the index's name: "a tar file".
        dtypes: dtypes of the index's arrays, little-endian, by name: ``{"starts": "<i8"}``.
        scan: returns the arrays for a path, an open file and a size; may raise DataError.
        fits: returns whether arrays are possible for a file of some size in bytes: every row number
            and every byte position in the arrays must exist.
        has_records: whether the file has records with checksums, and the index has the older
            format: one array "offsets", (records + 1,).
    """

    name: str
    dtypes: Mapping[str, str]
    scan: Callable[[Path, BinaryIO, int], Arrays]
    fits: Callable[[Arrays, int], bool]
    has_records: bool = False


@dataclass(frozen=True)
class Indexed:
    """A file with an index, and the size and time of the file when the index was built."""

    path: Path
    size: int  # bytes
    changed_ns: int  # the file's time of change (mtime)
    arrays: Arrays

    def open(self) -> int:
        """Return a descriptor of the file, which the caller closes.

        Raises:
            DataError: the file cannot be read, or was changed since.
        """
        try:
            fd = regular_descriptor(self.path)
            stat = os.fstat(fd)
        except OSError as error:
            got = error.strerror or error
            raise DataError(self.path, got=got, expected="a readable file") from error
        if (stat.st_size, stat.st_mtime_ns) != (self.size, self.changed_ns):
            os.close(fd)
            got = "a file that was changed since it was indexed"
            raise DataError(self.path, got=got, expected="the same one", fix="start again")
        return fd

    def read(self, fd: int, start: int, size: int, where: str, fix: str = "get it again") -> bytes:
        """Read bytes of the open file. Not through a mapping: the file may be truncated.

        Args:
            where: name of the row, for messages.
            fix: advice to the user if the file was truncated.

        Raises:
            DataError: the file ends before the bytes.
        """
        try:
            content = os.pread(fd, size, start)
        except OSError as error:
            got = error.strerror or error
            raise DataError(where, got=got, expected="a readable file", offset=start) from error
        if len(content) < size:
            got = f"the end of the file after {len(content):,} bytes"
            raise DataError(where, got=got, expected=f"{size:,} bytes", offset=start, fix=fix)
        return content


def indexed(path: Path, kind: Kind) -> Indexed:
    """Return a file with the stored index, or with a new index, which is then stored.

    Raises:
        DataError: the file is missing, compressed, or of another kind.
    """
    path, readable = path.absolute(), "a readable file" if kind.has_records else kind.name
    try:
        with open_regular(path) as file:
            stat = os.fstat(file.fileno())
            for place in _places(path, kind):
                if (arrays := _kept(place, stat, kind)) is not None:
                    return Indexed(path, stat.st_size, stat.st_mtime_ns, arrays)
            compressed = COMPRESSED.get(file.peek(2)[:2])
            if compressed is not None and not kind.has_records:  # a length may begin so
                got = f"a {compressed}-compressed file, in which no row can be found by its number"
                raise DataError(path, got=got, expected=kind.name, fix="unpack it")
            arrays = kind.scan(path, file, stat.st_size)
            after = os.fstat(file.fileno())
    except FileNotFoundError:
        raise DataError(path, got="no such file", expected=kind.name) from None
    except OSError as error:
        raise DataError(path, got=error.strerror or error, expected=readable) from error
    if (stat.st_size, stat.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise DataError(path, got="a file that is being written", expected="one that is done")
    fresh = Indexed(path, stat.st_size, stat.st_mtime_ns, arrays)
    _keep(fresh, kind)
    return fresh


def _places(path: Path, kind: Kind) -> tuple[Path, Path]:
    known_by, word = kind.name.encode(), f".{kind.name.split()[-2]}"
    if kind.has_records:
        known_by, word = b"", ""
    name = hashlib.sha256(os.fsencode(path) + known_by).hexdigest()[:32]
    beside = path.with_name(f".{path.name}{word}.index")
    return beside, cache_dir() / "indexes" / f"{name}.index"


def _kept(place: Path, stat: os.stat_result, kind: Kind) -> Arrays | None:
    """Return the arrays in an index file; None if the file is missing, outdated or damaged."""
    try:
        with open_regular(place) as file:
            size = os.fstat(file.fileno()).st_size
            magic, *of_file, number, crc = _TOP.unpack(file.read(_TOP.size))
            if of_file != [stat.st_size, stat.st_mtime_ns] or magic != _magic(kind):
                return None
            if kind.has_records:
                head, table = b"", {"offsets": ["<i8", _TOP.size, 8 * (number + 1)]}
            elif 0 < number <= _MOST_HEAD_BYTES:
                table = json.loads(head := file.read(number))
            else:
                return None
            # 1. Require exactly the arrays of this kind of file, one after another: so the size of
            # the index bounds the reading.
            if not isinstance(table, dict) or table.keys() != kind.dtypes.keys():
                return None
            at = _TOP.size + len(head)
            for name, dtype in kind.dtypes.items():
                at += _padding(at, kind)
                _, _, nbytes = table[name]
                if table[name] != [dtype, at, nbytes] or type(nbytes) is not int:
                    return None
                if not 0 <= nbytes <= size - at or nbytes % np.dtype(dtype).itemsize:
                    return None
                at += nbytes
            # 2. Require an index of at most ``_MOST_TIMES`` the file: a sparse index is not read.
            if at != size or size > _MOST_TIMES * stat.st_size + _MOST_HEAD_BYTES:
                return None
            content = np.zeros(size, dtype=np.uint8)  # same alignment as in the file
            at, found = _TOP.size + len(head), crc32c.value(head)
            while piece := file.read(min(_PIECE_BYTES, size - at)):
                content[at : at + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
                at, found = at + len(piece), crc32c.extend(found, piece)
            if (at, found) != (size, crc):
                return None
            arrays = {
                name: content[start : start + nbytes].view(dtype)
                for name, (dtype, start, nbytes) in table.items()
            }
            return arrays if kind.fits(arrays, stat.st_size) else None
    except (OSError, struct.error, ValueError, TypeError, RecursionError):
        return None


def _magic(kind: Kind) -> bytes:
    return _RECORDS if kind.has_records else _ARRAYS


def _padding(at: int, kind: Kind) -> int:
    """Return the number of padding bytes before an array, in an index of this kind."""
    return 0 if kind.has_records else -at % _ALIGNMENT


def _keep(fresh: Indexed, kind: Kind) -> None:
    """Write an index file, completely or not at all."""
    arrays = {name: np.ascontiguousarray(array) for name, array in fresh.arrays.items()}
    size, head = -1, b""
    table: dict[str, tuple[str, int, int]] = {}
    while len(head) != size:  # the positions of the arrays depend on the length of the header
        size, at = len(head), _TOP.size + len(head)
        for name, array in arrays.items():
            at += _padding(at, kind)
            table[name] = (array.dtype.newbyteorder("<").str, at, array.nbytes)
            at += array.nbytes
        head = b"" if kind.has_records else json.dumps(table).encode()
    body = bytearray(head)
    for (_, start, _), array in zip(table.values(), arrays.values(), strict=True):
        body += bytes(start - _TOP.size - len(body))
        body += array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    number = len(arrays["offsets"]) - 1 if kind.has_records else len(head)
    of_file = fresh.size, fresh.changed_ns
    top = _TOP.pack(_magic(kind), *of_file, number, crc32c.value(bytes(body)))
    reasons = []
    beside, cached = _places(fresh.path, kind)
    for place in (beside, cached):
        try:
            if place is cached:
                place.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(place, top + bytes(body))
            return
        except OSError as error:
            reasons.append(f"{place}: {error.strerror or error}")
    logging.getLogger("quorate").warning(
        "the index of %s cannot be saved, so every start builds it again (%s)",
        *(fresh.path, "; ".join(reasons)),
    )


Paths = str | Path | Sequence[str | Path]


def paths_of(given: Paths) -> list[Path]:
    """Return a path, or several, as a list."""
    return [Path(path) for path in ([given] if isinstance(given, (str, Path)) else given)]


class IndexedFiles(Dataset[Any]):
    """The rows of one or more files, in the order of the files.

    No file stays open, and nothing is shared: any thread, and any copy in another process, may read
    at any time.

    Args:
        files: the files, in the order of the rows.
        counts: number of rows of each file.
        name: name of the argument with the files, for messages.
        first_byte: offset for messages; None: messages about an empty file have no offset.

    Raises:
        DataError: all files together have no row.
    """

    noun = "row"

    def __init__(
        self,
        files: Sequence[Indexed],
        counts: Sequence[int],
        *,
        name: str = "files",
        first_byte: int | None = None,
    ) -> None:
        self._files = files
        # (files + 1,): the number of the first row of each file, and the number of rows.
        self.starts: NDArray[np.int64] = np.cumsum([0, *counts], dtype=np.int64)
        if not len(self):
            where = ", ".join(str(file.path) for file in files) or name
            got = f"no {self.noun}"
            raise DataError(where, got=got, expected="at least one", offset=first_byte)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, row: int) -> Any:
        """Return the sample of a row.

        Raises:
            IndexError: the row does not exist.
            DataError: the row is damaged, or the file was changed.
        """
        if not -len(self) <= row < len(self):
            raise IndexError(f"{self.noun} {row:,} of {len(self):,}")
        return self.__getitems__([row % len(self)])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[Any]:
        """Return the samples of several rows. Opens each file once; raises like ``[row]``."""
        if not rows:
            return []
        if min(rows) < 0 or max(rows) >= len(self):
            raise IndexError(f"{self.noun}s {min(rows):,} to {max(rows):,} of {len(self):,}")
        files = np.searchsorted(self.starts, rows, side="right") - 1
        samples: list[Any] = [None] * len(rows)
        for number in np.unique(files).tolist():
            file, first = self._files[number], int(self.starts[number])
            fd = file.open()
            try:
                for position in np.flatnonzero(files == number).tolist():
                    samples[position] = self._sample(file, fd, int(rows[position]) - first)
            finally:
                os.close(fd)
        return self._finish(samples)

    def _finish(self, samples: list[Any]) -> list[Any]:
        """Return the samples of several rows, after a joint conversion."""
        return samples

    @abstractmethod
    def _sample(self, file: Indexed, fd: int, row: int) -> Any:
        """Return the sample of a row of an open file."""
