"""Indexes of files that have no table of contents: found once, and kept beside them.

The index of FILE is kept as .FILE.index in the same folder, or under QUORATE_DATA where nothing can
be written there. It belongs to a path, a size and a time of change, and has a checksum: of a file
that was replaced, or with an index that is damaged, a new one is made.

An index is a few named arrays. They are read into memory, not mapped: the system ends a process
that reads from a mapped file after somebody has cut the file. A checksum does not say that quorate
wrote an index, either, so each kind of file compares the arrays with the size of the file before
anything is read with them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from quorate.data import crc32c
from quorate.errors import DataError
from quorate.machine.atomic_file import write_atomically
from quorate.machine.environment import cache_dir
from quorate.machine.regular_file import open_regular, regular_descriptor

# Magic; the file's size and time of change; bytes of the header; CRC-32C of all that follows.
_TOP = struct.Struct("<16sqqqI")
_MAGIC = b"quorate-arrays2\n"
_ALIGNMENT = 64
_PIECE_BYTES = 1 << 22
_MOST_HEAD_BYTES = 4096
_MOST_TIMES = 16  # as large as its file an index is: of lines of one byte 8 times, of tars once

Arrays = Mapping[str, NDArray[Any]]
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}


@dataclass(frozen=True)
class Kind:
    """A kind of file that has no table of contents, and what its index holds.

    Args:
        name: for messages; the last word but one is in the name of the index: "a tar file".
        dtypes: of the index's arrays, little-endian, by name: ``{"starts": "<i8"}``.
        scan: makes the arrays of an open file, given path, file and size; may raise DataError.
        fits: whether arrays could be those of a file of a size in bytes: every number of a row
            and every byte that the arrays name has to be there.
    """

    name: str
    dtypes: Mapping[str, str]
    scan: Callable[[Path, BinaryIO, int], Arrays]
    fits: Callable[[Arrays, int], bool]


@dataclass(frozen=True)
class Indexed:
    """A file as it was when it was indexed."""

    path: Path
    size: int  # bytes
    changed_ns: int  # the file's time of change (mtime)
    arrays: Arrays

    def open(self) -> int:
        """Return a descriptor of the file, which the caller closes.

        Raises:
            DataError: it cannot be read, or was changed since.
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

    def read(self, fd: int, start: int, size: int, where: str) -> bytes:
        """Read bytes of the open file. Not through a mapping: it might be cut meanwhile.

        Raises:
            DataError: they are not there.
        """
        try:
            content = os.pread(fd, size, start)
        except OSError as error:
            got = error.strerror or error
            raise DataError(where, got=got, expected="a readable file", offset=start) from error
        if len(content) < size:
            got, fix = f"the end of the file after {len(content):,} bytes", "get it again"
            raise DataError(where, got=got, expected=f"{size:,} bytes", offset=start, fix=fix)
        return content


def indexed(path: Path, kind: Kind) -> Indexed:
    """Return a file with its index: the one that was kept, or a new one, which is kept.

    Raises:
        DataError: the file is missing, compressed, or not what it should be.
    """
    path = path.absolute()
    try:
        with open_regular(path) as file:
            stat = os.fstat(file.fileno())
            for place in _places(path, kind):
                if (arrays := _kept(place, stat, kind)) is not None:
                    return Indexed(path, stat.st_size, stat.st_mtime_ns, arrays)
            head = file.peek(2)[:2]
            if (compressed := COMPRESSED.get(head)) is not None:
                got = f"a {compressed}-compressed file, in which no row can be found by its number"
                raise DataError(path, got=got, expected=kind.name, fix="unpack it")
            arrays = kind.scan(path, file, stat.st_size)
            after = os.fstat(file.fileno())
    except FileNotFoundError:
        raise DataError(path, got="no such file", expected=kind.name) from None
    except OSError as error:
        raise DataError(path, got=error.strerror or error, expected=kind.name) from error
    if (stat.st_size, stat.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise DataError(path, got="a file that is being written", expected="one that is done")
    fresh = Indexed(path, stat.st_size, stat.st_mtime_ns, arrays)
    _keep(fresh, kind)
    return fresh


def _places(path: Path, kind: Kind) -> tuple[Path, Path]:
    name = hashlib.sha256(os.fsencode(path) + kind.name.encode()).hexdigest()[:32]
    beside = path.with_name(f".{path.name}.{kind.name.split()[-2]}.index")
    return beside, cache_dir() / "indexes" / f"{name}.index"


def _kept(place: Path, stat: os.stat_result, kind: Kind) -> Arrays | None:
    """Return the arrays in an index file; None if there is none that fits, or it is damaged."""
    try:
        with open_regular(place) as file:
            size = os.fstat(file.fileno()).st_size
            magic, *of_file, head_bytes, crc = _TOP.unpack(file.read(_TOP.size))
            if magic != _MAGIC or of_file != [stat.st_size, stat.st_mtime_ns]:
                return None
            if not 0 < head_bytes <= _MOST_HEAD_BYTES:
                return None
            head = file.read(head_bytes)
            table = json.loads(head)
            # 1. The arrays that an index of this kind has, one behind the other, and nothing else:
            # so the file's size bounds what is read.
            if not isinstance(table, dict) or table.keys() != kind.dtypes.keys():
                return None
            at = _TOP.size + head_bytes
            for name, dtype in kind.dtypes.items():
                at += -at % _ALIGNMENT
                _, _, nbytes = table[name]
                if table[name] != [dtype, at, nbytes] or type(nbytes) is not int:
                    return None
                if not 0 <= nbytes <= size - at or nbytes % np.dtype(dtype).itemsize:
                    return None
                at += nbytes
            # 2. No index is larger than ``_MOST_TIMES`` the file: a sparse one is not read.
            if at != size or size > _MOST_TIMES * stat.st_size + _MOST_HEAD_BYTES:
                return None
            content = np.zeros(size, dtype=np.uint8)  # aligned as the file is
            at, found = _TOP.size + head_bytes, crc32c.value(head)
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


def _keep(fresh: Indexed, kind: Kind) -> None:
    """Write an index file, whole or not at all."""
    arrays = {name: np.ascontiguousarray(array) for name, array in fresh.arrays.items()}
    size, head = -1, b""
    table: dict[str, tuple[str, int, int]] = {}
    while len(head) != size:  # where arrays begin depends on how long the header is
        size, at = len(head), _TOP.size + len(head)
        for name, array in arrays.items():
            at += -at % _ALIGNMENT
            table[name] = (array.dtype.newbyteorder("<").str, at, array.nbytes)
            at += array.nbytes
        head = json.dumps(table).encode()
    body = bytearray(head)
    for (_, start, _), array in zip(table.values(), arrays.values(), strict=True):
        body += bytes(start - _TOP.size - len(body))
        body += array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    top = _TOP.pack(_MAGIC, fresh.size, fresh.changed_ns, len(head), crc32c.value(bytes(body)))
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
