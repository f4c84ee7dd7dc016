"""Token files: rows of any length in one file, which all processes of a machine read row by row.

As Python lists, a million pairs take half a gigabyte or more in each process. The content of a
token file is in memory once, in the file cache of the operating system; a reading process needs no
memory for the rows. The file is not memory-mapped, because the operating system kills a process
that reads a part which was cut off from a mapped file.

    bytes    64 of magic and version; V values; up to 63 of padding
    offsets  (R * K + 1,) int64: where each field of each row begins among the values, and V
    end      128 bytes: R, K, V, the type of a value, CRC-32C of the offsets and of the end

Legend: R rows, K fields of a row, V values of all rows.
"""

from __future__ import annotations

import hashlib
import os
import struct
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, DTypeLike, NDArray
from torch.utils.data import Dataset

from quorate.data import crc32c
from quorate.errors import DataError, SettingError
from quorate.machine.atomic_file import write_atomically
from quorate.machine.regular_file import exists, regular_descriptor

_MAGIC = b"quorate tokens, version 1\n".ljust(64, b"\0")
_ALIGNMENT = 64
_END = struct.Struct("<qqq8s32sI60x")  # R, K, V, type, SHA-256 of made_from, CRC-32C
_TYPES = ("<u1", "<i1", "<u2", "<i2", "<i4", "<i8", "<f4", "<f8")
_ROWS_AT_ONCE = 4096
_OFFSETS_AT_ONCE = 1 << 15

Row = ArrayLike | Sequence[ArrayLike]


class Tokens(Dataset[Any]):
    """The rows of a token file. Each row is read when needed, never the whole file.

    A row with one field is a tensor (T,); a row with several fields is a tuple of tensors. The
    dtype is that of the file. Use ``Loading(collate=)`` to pad rows of different lengths.

    Do not overwrite a file in use. Write a new file in its place, as ``write_tokens`` does. Reading
    from a file that was cut short meanwhile raises ``DataError``.

    Args:
        path: a file written by ``write_tokens``.

    Raises:
        DataError: the file is missing, cut short, damaged, or not a token file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self._file = _TokenFile(self.path)
        self._fields, self.made_from_sha256 = self._file.fields, self._file.made_from_sha256

    @classmethod
    def built(
        cls,
        path: str | Path,
        make: Callable[[], Iterable[Row]],
        *,
        dtype: DTypeLike = np.int32,
        made_from: str = "",
    ) -> Tokens:
        """Open a token file; write the file first if missing.

        Several processes may call this method at the same time. Each opens a complete file, the
        file of the last writer.

        Args:
            path: path of the file.
            make: a function that returns the rows; see ``write_tokens``.
            dtype: dtype of the values. Default: int32.
            made_from: description of the source of the rows, such as the hash or the version of a
                vocabulary. A file with another ``made_from`` is replaced.

        Raises:
            DataError: the file is damaged, or a value does not fit ``dtype``.
        """
        if exists(path):
            there = cls(path)
            if there.made_from_sha256 == _digest(made_from):
                return there
        write_tokens(path, make(), dtype=dtype, made_from=made_from)
        return cls(path)

    def __len__(self) -> int:
        return self._file.rows

    def __getitem__(self, row: int) -> Any:
        """Return a row: a tensor, or a tuple of tensors.

        Raises:
            IndexError: the row does not exist.
            DataError: the file was truncated or changed while in use.
        """
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row:,} of {len(self):,}")
        first = row % len(self) * self._fields
        offsets = self._file.offsets(first, self._fields + 1).tolist()
        values = self._file.values(offsets[0], offsets[-1])
        # Copies: the bytes read are read-only, and fields must not share memory.
        fields = tuple(
            torch.from_numpy(values[start - offsets[0] : stop - offsets[0]].copy())
            for start, stop in pairwise(offsets)
        )
        return fields if self._fields > 1 else fields[0]

    def lengths(self, field: int = 0) -> NDArray[np.int64]:
        """Return the number of values of a field by row, (R,) int64, for ``Loading(order=)``."""
        every = np.diff(self._file.offsets(0, self._file.rows * self._fields + 1))
        return every[field :: self._fields].astype(np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokens, (self.path,)  # another process opens the file again


def write_tokens(
    path: str | Path, rows: Iterable[Row], *, dtype: DTypeLike = np.int32, made_from: str = ""
) -> None:
    """Write a token file atomically. Blocks until the file is on the disk.

    Needs 8 bytes of memory for each field of each row, whatever the length of the field.

    Args:
        path: path of the file, in an existing folder.
        rows: rows; each row is a list or array of numbers, or a tuple of lists or arrays. All rows
            have the same number of fields.
        dtype: dtype of the values. Default: int32.
        made_from: see ``Tokens.built``.

    Raises:
        DataError: ``rows`` is empty, a row has another number of fields than the first row, or a
            value does not fit ``dtype``.
        SettingError: torch has no such dtype.
        OSError: the file cannot be written.
    """
    kind = np.dtype(dtype).newbyteorder("<")
    if kind.str.replace("|", "<") not in _TYPES:
        fix = f"choose one of {', '.join(np.dtype(name).name for name in _TYPES)}"
        raise SettingError("dtype", kind.name, "a type of numbers that torch has", fix)
    write_atomically(Path(path), _pieces(str(path), rows, kind, made_from))


def _pieces(
    where: str, rows: Iterable[Row], kind: np.dtype[Any], made_from: str
) -> Iterator[bytes]:
    yield _MAGIC
    offsets, fields, number = array("q", [0]), 0, 0
    every = iter(rows)
    while some := list(islice(every, _ROWS_AT_ONCE)):
        parts = []
        for row, values in enumerate(some, start=number):
            of_row = values if isinstance(values, tuple) else (values,)
            fields = fields or len(of_row)
            if len(of_row) != fields:
                got, expected = f"{len(of_row)} fields", f"{fields}, as in the first row"
                raise DataError(f"{where}, row {row:,}", got=got, expected=expected)
            for field in of_row:
                part = np.asarray(field)
                if part.ndim != 1:
                    got, expected = f"an array of shape {part.shape}", "(T,) numbers"
                    raise DataError(f"{where}, row {row:,}", got=got, expected=expected)
                parts.append(part)
                offsets.append(offsets[-1] + len(part))
        yield _fitting(parts, kind, where, number, fields).tobytes()
        number += len(some)
    if not number:
        raise DataError(where, got="no row", expected="at least one")
    yield bytes(-(offsets[-1] * kind.itemsize) % _ALIGNMENT)
    table = np.frombuffer(offsets, dtype=np.int64).astype("<i8").tobytes()
    yield table
    end = (number, fields, offsets[-1], kind.str.replace("|", "<").encode(), _digest(made_from))
    yield _END.pack(*end, crc32c.extend(_checksum_of_end(*end), table))


def _fitting(
    parts: Sequence[NDArray[Any]], kind: np.dtype[Any], where: str, first: int, fields: int
) -> NDArray[Any]:
    """Return the values of some rows, concatenated, in the dtype of the file.

    Args:
        parts: one array per field and row.
        kind: dtype of the values.
        where: the file, for messages.
        first: number of the first row.
        fields: number of fields per row.

    Raises:
        DataError: a value does not fit the dtype.
    """
    kinds = "iufb" if kind.kind == "f" else "iub"
    there = [part for part in parts if len(part)]
    values = np.concatenate(there) if there else np.zeros(0, kind)
    is_whole = kind.kind != "f"
    least, most = (np.iinfo(kind).min, np.iinfo(kind).max) if is_whole else (0, 0)

    def fits(some: NDArray[Any]) -> bool:
        if some.dtype.kind not in kinds:
            return False
        return not is_whole or (int(some.min()) >= least and int(some.max()) <= most)

    if not there or (all(part.dtype.kind in kinds for part in there) and fits(values)):
        return values.astype(kind, copy=False)
    wrong_ones = ((n, part) for n, part in enumerate(parts) if len(part) and not fits(part))
    if (found := next(wrong_ones, None)) is None:  # int64 and uint64 concatenate to float64
        return np.concatenate([part.astype(kind) for part in there])
    number, part = found
    row = f"{where}, row {first + number // fields:,}"
    if part.dtype.kind not in kinds:
        raise DataError(row, got=f"values of {part.dtype}", expected=kind.name)
    wrong, fix = part[(part < least) | (part > most)][0], "choose a larger dtype"
    raise DataError(row, got=wrong, expected=f"{least} to {most}", fix=fix)


class _TokenFile:
    """An open token file. Any thread may read; a fork reads through the same descriptor.

    Raises:
        DataError: the file is missing, truncated, damaged, or not a token file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        expected = "a file of tokens"
        try:
            self._fd = regular_descriptor(path)
        except FileNotFoundError:
            raise DataError(path, got="no such file", expected=expected) from None
        except OSError as error:
            raise DataError(path, got=error.strerror or error, expected=expected) from error
        closing = weakref.finalize(self, os.close, self._fd)
        closing.atexit = False  # a thread may still be reading
        size = os.fstat(self._fd).st_size
        if self._read(0, min(size, len(_MAGIC))) != _MAGIC:
            raise DataError(path, got="another file", expected=expected)
        if size < len(_MAGIC) + _END.size:
            raise self._damaged()
        *end, checksum = _END.unpack(self._read(size - _END.size, _END.size))
        self.rows: int = end[0]
        self.fields: int = end[1]
        self._values: int = end[2]
        name: bytes = end[3].rstrip(b"\0")
        self.made_from_sha256: bytes = end[4]
        is_known = name.decode("ascii", "replace") in _TYPES
        if not is_known or min(self.rows, self.fields, self._values + 1) < 1:
            raise self._damaged()
        self._kind = np.dtype(name.decode())
        at = len(_MAGIC) + self._values * self._kind.itemsize
        self._table_at = at + -at % _ALIGNMENT
        self._bounds = self.rows * self.fields + 1
        if size != self._table_at + 8 * self._bounds + _END.size:
            raise self._damaged()
        # Check the offsets piece by piece: in order, from the first value to the end of the last.
        crc = _checksum_of_end(self.rows, self.fields, self._values, name, self.made_from_sha256)
        before = 0
        for first in range(0, self._bounds, _OFFSETS_AT_ONCE):
            some = self.offsets(first, min(_OFFSETS_AT_ONCE, self._bounds - first))
            crc = crc32c.extend(crc, some.tobytes())
            bounds = np.concatenate([[before], some])
            if (bounds[1:] < bounds[:-1]).any() or (first == 0 and some[0] != 0):
                raise self._damaged()
            before = int(some[-1])
        if crc != checksum or before != self._values:
            raise self._damaged()

    def offsets(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the positions of some fields among the values."""
        content = self._read(self._table_at + 8 * first, 8 * count)
        return np.frombuffer(content, dtype="<i8")

    def values(self, start: int, stop: int) -> NDArray[Any]:
        """Return some of the values."""
        if not 0 <= start <= stop <= self._values:
            raise self._damaged()
        itemsize = self._kind.itemsize
        content = self._read(len(_MAGIC) + start * itemsize, (stop - start) * itemsize)
        return np.frombuffer(content, dtype=self._kind)

    def _read(self, at: int, nbytes: int) -> bytes:
        try:
            content = os.pread(self._fd, nbytes, at)
            while 0 < len(content) < nbytes:  # the system reads at most 2 GiB per call
                more = os.pread(self._fd, nbytes - len(content), at + len(content))
                if not more:
                    break
                content += more
        except OSError as error:
            got = error.strerror or error
            raise DataError(self._path, got=got, expected="a readable file", offset=at) from error
        if len(content) < nbytes:
            got = f"the end of the file after {len(content):,} bytes"
            fix = "write it again: it was cut"
            raise DataError(self._path, got=got, expected=f"{nbytes:,}", offset=at, fix=fix)
        return content

    def _damaged(self) -> DataError:
        fix = "write it again: it was cut"
        return DataError(self._path, got="a damaged end", expected="a file of tokens", fix=fix)


def _checksum_of_end(rows: int, fields: int, values: int, name: bytes, made_from: bytes) -> int:
    """Return the CRC-32C of the end, to be extended by the offsets."""
    crc: int = crc32c.value(struct.pack("<qqq8s32s", rows, fields, values, name, made_from))
    return crc


def _digest(made_from: str) -> bytes:
    return hashlib.sha256(made_from.encode()).digest()
