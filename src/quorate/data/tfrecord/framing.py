"""The framing of records in a TFRecord file: a length, the data, and a checksum of each.

    length    8 bytes, little-endian uint64: n
    checksum  4 bytes, little-endian uint32: of the 8 bytes before
    data      n bytes
    checksum  4 bytes: of the data

The records follow each other without gaps, and the file contains nothing else. A checksum is a
CRC-32C, rotated and offset as in TensorFlow (tensorflow/core/lib/hash/crc32c.h), so that the
checksum of data with an embedded checksum is no trivial value.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from quorate.data import crc32c
from quorate.machine.atomic_file import write_atomically

HEAD = struct.Struct("<QI")  # length, checksum of its 8 bytes
TAIL = struct.Struct("<I")  # checksum of the data
OVERHEAD_BYTES = HEAD.size + TAIL.size

_LENGTH = struct.Struct("<Q")
_OFFSET = 0xA282EAD8


def checksum(data: bytes) -> int:
    """Return the masked CRC-32C of some bytes."""
    crc: int = crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _OFFSET) & 0xFFFFFFFF


def framed(data: bytes) -> bytes:
    """Return the data framed as a record."""
    length = _LENGTH.pack(len(data))
    return b"".join((length, TAIL.pack(checksum(length)), data, TAIL.pack(checksum(data))))


def length_in(head: bytes) -> int | None:
    """Return the length in a record's first 12 bytes; None if the checksum is wrong."""
    length: int
    length, stated = HEAD.unpack(head)
    return length if checksum(head[: _LENGTH.size]) == stated else None


def write_records(path: str | Path, records: Iterable[bytes]) -> int:
    """Write a TFRecord file. An existing file is replaced.

    Args:
        path: path of the file, in an existing folder.
        records: the data of each record, such as a serialized ``example``.

    Returns:
        The number of records.

    Raises:
        OSError: the file cannot be written. If writing or ``records`` fails, an existing file is
            unchanged.
    """
    count = 0

    def framed_records() -> Iterator[bytes]:
        nonlocal count
        for data in records:
            yield framed(data)
            count += 1

    write_atomically(Path(path), framed_records())
    return count
