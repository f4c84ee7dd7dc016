"""TFRecord files as a map-style dataset, with access to any record by number.

A TFRecord file has no table of contents, so finding a record by number requires reading all
lengths: see ``quorate.data.indexed_files``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quorate.data.indexed_files import Arrays, Indexed, IndexedFiles, Kind, Paths, indexed, paths_of
from quorate.data.tfrecord.example import Features
from quorate.data.tfrecord.framing import HEAD, OVERHEAD_BYTES, TAIL, checksum, length_in
from quorate.errors import DataError

_PIECE_BYTES = 1 << 14  # bytes read at a time while looking for lengths: large records are skipped
_GZIP = b"\x1f\x8b"
_DAMAGED = "the file is damaged: get it again"


class TFRecordDataset(IndexedFiles):
    """The records of one or more TFRecord files.

    Every read checks the length of the record against the index, and both checksums. No file stays
    open, and nothing is shared: any thread, and any copy in another process, may read at any time.

    Args:
        paths: a path, or a list of paths.
        parse: a function from the bytes of a record to a sample: ``Features`` for tf.train.Example,
            or your own function.

    Raises:
        DataError: a file is missing, damaged, cut short, compressed or not a TFRecord file, or all
            files together have no record.
    """

    noun = "record"

    def __init__(self, paths: Paths, parse: Callable[[bytes], Any]) -> None:
        self._parse = parse.values if isinstance(parse, Features) else parse
        self._features = parse if isinstance(parse, Features) else None
        found = [indexed(path, KIND) for path in paths_of(paths)]
        counts = [len(file.arrays["offsets"]) - 1 for file in found]
        super().__init__(found, counts, name="paths", first_byte=0)

    def _sample(self, file: Indexed, fd: int, row: int) -> Any:
        start, end = file.arrays["offsets"][row : row + 2].tolist()
        where = _record_name(file.path, row)
        content = file.read(fd, start, end - start, where, _DAMAGED)
        length, stored = length_in(content[: HEAD.size]), end - start - OVERHEAD_BYTES
        if length != stored:
            got = "a length with a wrong checksum" if length is None else f"a length of {length:,}"
            expected = f"{stored:,}, as it was"
            raise DataError(where, got=got, expected=expected, offset=start, fix=_DAMAGED)
        data = content[HEAD.size : -TAIL.size]
        if TAIL.unpack_from(content, len(content) - TAIL.size)[0] != checksum(data):
            got, expected = "data with a wrong checksum", "a right one"
            raise DataError(where, got=got, expected=expected, offset=start, fix=_DAMAGED)
        try:
            return self._parse(data)
        except DataError as error:
            got = f"{error.where}: {error.got}"
            raise DataError(where, got=got, expected=error.expected, offset=start) from error
        except Exception as error:
            error.add_note(f"quorate: in {where}, at byte {start:,}")
            raise

    def _finish(self, samples: list[Any]) -> list[Any]:
        return samples if self._features is None else self._features.samples(samples)


def _record_name(path: Path, number: int) -> str:
    """Return a record's name for messages."""
    return f"{path}, record {number:,}"


def _scan(path: Path, file: BinaryIO, size: int) -> Arrays:
    """Read each length of a file, and check the checksum of each."""
    fd = file.fileno()
    offsets = [0]
    at = 0  # start of the next record
    piece, start = b"", 0  # some bytes of the file, and their position
    good, length = b"", 0  # the last valid head: most records have the same
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
                _record_name(path, len(offsets) - 1),
                got=f"the end of the file after {size - at:,} bytes",
                expected=f"{end - at:,} bytes, as its length says",
                offset=at,
                fix="the file was cut: get it again",
            )
        offsets.append(end)
        at = end
    return {"offsets": np.array(offsets, dtype=np.int64)}


def _length(path: Path, number: int, at: int, head: bytes, size: int) -> int:
    where = _record_name(path, number)
    if len(head) < HEAD.size:
        got = f"the end of the file after {size - at} bytes"
        raise DataError(where, got=got, expected=f"{HEAD.size} bytes of a length", offset=at)
    length = length_in(head)
    if length is None:
        # A length of 35,615 begins like gzip, so only a wrong checksum proves compression.
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


def _fits(arrays: Arrays, size: int) -> bool:
    """Return whether offsets are possible for a file: from 0 to the end, with room for records."""
    offsets = arrays["offsets"]
    return (
        bool(((offsets >= 0) & (offsets <= size)).all())  # then no difference overflows
        and offsets[:1].tolist() == [0]
        and bool(offsets[-1] == size)
        and not bool((np.diff(offsets) < OVERHEAD_BYTES).any())
    )


KIND = Kind("a TFRecord file", {"offsets": "<i8"}, _scan, _fits, has_records=True)
