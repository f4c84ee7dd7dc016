"""Where the records of a TFRecord file begin: found once, and kept in a file beside it.

A TFRecord file has no table of contents, so that all lengths must be read to find a record by its
number. The index of FILE is kept as .FILE.index in the same folder, or under QUORATE_DATA where
nothing can be written there. It belongs to a path, a size and a time of change, and has a checksum:
a file that was replaced, or a damaged index, is indexed anew. Nor does a checksum make an index a
true one: its offsets have to lie in the file, in order, and whoever reads a record compares the
record's length and its checksums.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from quorate.data import crc32c
from quorate.data.tfrecord.framing import HEAD, OVERHEAD_BYTES, length_in
from quorate.errors import DataError
from quorate.machine.atomic_file import write_atomically
from quorate.machine.environment import cache_dir
from quorate.machine.regular_file import open_regular, read_regular

_PIECE_BYTES = 1 << 14  # read at a time while looking for lengths: large records are jumped over

# Magic; the file's size and time of change; records; CRC-32C of what follows: int64 offsets.
_TOP = struct.Struct("<16sqqqI")
_MAGIC = b"quorate-index-1\n"

_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class Index:
    """The records of one file, as it was when it was indexed."""

    path: Path
    size: int  # bytes
    changed_ns: int  # the file's time of change (mtime)
    offsets: NDArray[np.int64]  # (records + 1,): where each begins, and where the last one ends

    def __len__(self) -> int:
        return len(self.offsets) - 1


def index(path: Path) -> Index:
    """Return the index of a file: the one that was kept, or a new one, which is kept.

    Raises:
        DataError: the file is missing, is no TFRecord file, or is cut or damaged.
    """
    path = path.absolute()
    try:
        with open_regular(path) as file:
            stat = os.fstat(file.fileno())
            for place in _places(path):
                offsets = _read(place, stat)
                if offsets is not None:
                    return Index(path, stat.st_size, stat.st_mtime_ns, offsets)
            offsets = _scan(path, file, stat.st_size)
            after = os.fstat(file.fileno())
    except FileNotFoundError:
        raise DataError(path, got="no such file", expected="a TFRecord file") from None
    except OSError as error:
        raise DataError(path, got=error.strerror or error, expected="a readable file") from error
    if (stat.st_size, stat.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise DataError(path, got="a file that is being written", expected="one that is done")
    fresh = Index(path, stat.st_size, stat.st_mtime_ns, offsets)
    _keep(fresh)
    return fresh


def record_name(path: Path, number: int) -> str:
    """Return what messages call a record."""
    return f"{path}, record {number:,}"


def _scan(path: Path, file: BinaryIO, size: int) -> NDArray[np.int64]:
    """Go from length to length, and check each."""
    fd = file.fileno()
    offsets = [0]
    at = 0  # where the next record begins
    piece, start = b"", 0  # some bytes of the file, and where they begin
    good, length = b"", 0  # the newest head that was right: most often the next one is the same
    while at < size:
        head = piece[at - start : at - start + HEAD.size]
        if len(head) < HEAD.size:
            piece, start = os.pread(fd, _PIECE_BYTES, at), at
            head = piece[: HEAD.size]
        if head != good:
            length, good = _length(path, len(offsets) - 1, at, head, size), head
        end = at + OVERHEAD_BYTES + length
        if end > size:
            raise DataError(
                record_name(path, len(offsets) - 1),
                got=f"the end of the file after {size - at:,} bytes",
                expected=f"{end - at:,} bytes, as its length says",
                offset=at,
                fix="the file was cut: get it again",
            )
        offsets.append(end)
        at = end
    return np.array(offsets, dtype=np.int64)


def _length(path: Path, number: int, at: int, head: bytes, size: int) -> int:
    where = record_name(path, number)
    if len(head) < HEAD.size:
        got = f"the end of the file after {size - at} bytes"
        raise DataError(where, got=got, expected=f"{HEAD.size} bytes of a length", offset=at)
    length = length_in(head)
    if length is None:
        # A length of 35,615 begins like gzip, so only a wrong checksum tells.
        if at == 0 and (head.startswith(_GZIP) or _is_zlib(head)):
            kind = "gzip" if head.startswith(_GZIP) else "zlib"
            raise DataError(
                path,
                got=f"a {kind}-compressed file, in which no record can be found by its number",
                expected="a plain TFRecord file",
                fix="unpack it (gunzip), or write it without compression",
            )
        got = "a length with a wrong checksum"
        fix = "the file is damaged, or no TFRecord file: get it again"
        raise DataError(where, got=got, expected="a right one", offset=at, fix=fix)
    return length


def _is_zlib(head: bytes) -> bool:
    return head[0] == 0x78 and int.from_bytes(head[:2], "big") % 31 == 0


def _places(path: Path) -> tuple[Path, Path]:
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:32]
    return path.with_name(f".{path.name}.index"), cache_dir() / "indexes" / f"{name}.index"


def _read(place: Path, stat: os.stat_result) -> NDArray[np.int64] | None:
    """Read the offsets in an index file; None if there is none that fits, or it is damaged."""
    try:
        # A record takes OVERHEAD_BYTES at least, and its offset 8.
        most = _TOP.size + 8 * (stat.st_size // OVERHEAD_BYTES + 1)
        content = read_regular(place, most)
        magic, size, changed_ns, records, crc = _TOP.unpack_from(content)
    except (OSError, struct.error):
        return None
    body = content[_TOP.size :]
    fits = (magic, size, changed_ns) == (_MAGIC, stat.st_size, stat.st_mtime_ns)
    if not fits or len(body) != 8 * (records + 1) or crc32c.value(body) != crc:
        return None
    offsets = np.frombuffer(body, dtype="<i8").astype(np.int64)
    is_in_file = ((offsets >= 0) & (offsets <= stat.st_size)).all()  # so no difference overflows
    if not is_in_file or offsets[:1].tolist() != [0] or offsets[-1] != stat.st_size:
        return None
    return None if (np.diff(offsets) < OVERHEAD_BYTES).any() else offsets


def _keep(fresh: Index) -> None:
    """Write an index file, whole or not at all."""
    body = fresh.offsets.astype("<i8").tobytes()
    top = (_MAGIC, fresh.size, fresh.changed_ns, len(fresh), crc32c.value(body))
    reasons = []
    beside, cached = _places(fresh.path)
    for place in (beside, cached):
        try:
            if place is cached:
                place.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(place, _TOP.pack(*top) + body)
            return
        except OSError as error:
            reasons.append(f"{place}: {error.strerror or error}")
    logging.getLogger("quorate").warning(
        "the index of %s cannot be saved, so every start builds it again (%s)",
        *(fresh.path, "; ".join(reasons)),
    )
