"""Tokens: rows of any lengths in one file, which all processes of a machine map into memory.

A million pairs as Python lists take half a gigabyte or more of each process. In a file that is
mapped they are in memory once, in the system's cache of files, and a process that reads them has
nothing of its own.

    bytes    64 of magic and version; V values; up to 63 of padding
    offsets  (R * K + 1,) int64: where each field of each row begins among the values, and V
    end      128 bytes: R, K, V, the type of a value, CRC-32C of the offsets and of the end

Legend: R rows, K fields of a row, V values of all rows.
"""

from __future__ import annotations

import hashlib
import os
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import torch
from numpy.typing import ArrayLike, DTypeLike, NDArray
from torch.utils.data import Dataset

from quorate.errors import DataError, SettingError
from quorate.machine.atomic_file import write_atomically
from quorate.machine.regular_file import open_regular

_MAGIC = b"quorate tokens, version 1\n".ljust(64, b"\0")
_ALIGNMENT = 64
_END = struct.Struct("<qqq8s32sI60x")  # R, K, V, type, SHA-256 of made_from, CRC-32C
_TYPES = ("<u1", "<i1", "<u2", "<i2", "<i4", "<i8", "<f4", "<f8")
_ROWS_AT_ONCE = 4096

Row = ArrayLike | Sequence[ArrayLike]


class Tokens(Dataset[Any]):
    """The rows of a file of tokens, which is mapped and never read as a whole.

    A row of one field is a tensor (T,), one of several a tuple of them: int32 of int32, and so on,
    in memory of their own. ``Loading(collate=)`` pads them.

    Do not write to the file while it is used: write another one in its place, as ``write_tokens``
    does. A process that reads what was cut off from a mapped file is ended by the system.

    Args:
        path: of a file that ``write_tokens`` has written.

    Raises:
        DataError: it is missing, cut or damaged, or no file of tokens.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        found = _opened(self.path)
        self._values, self._offsets, self._fields, self.made_from_sha256 = found

    @classmethod
    def built(
        cls,
        path: str | Path,
        make: Callable[[], Iterable[Row]],
        *,
        dtype: DTypeLike = np.int32,
        made_from: str = "",
    ) -> Tokens:
        """Return the rows of a file, which is written if it is not there.

        Several processes may call it at once: each finds a whole file, that of whoever wrote last.

        Args:
            path: of the file.
            make: gives the rows, see ``write_tokens``.
            dtype: of the values.
            made_from: what the rows follow from: a vocabulary's hash, a version. A file that was
                made from something else is replaced.

        Raises:
            DataError: the file is damaged, or a value does not fit.
        """
        if Path(path).exists():
            there = cls(path)
            if there.made_from_sha256 == _digest(made_from):
                return there
        write_tokens(path, make(), dtype=dtype, made_from=made_from)
        return cls(path)

    def __len__(self) -> int:
        return (len(self._offsets) - 1) // self._fields

    def __getitem__(self, row: int) -> Any:
        """Return a row: a tensor, or a tuple of tensors.

        Raises:
            IndexError: there is no such row.
        """
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row:,} of {len(self):,}")
        first = row % len(self) * self._fields
        offsets = self._offsets[first : first + self._fields + 1].tolist()
        # Copies: a mapped file cannot be written, and a tensor of it would say so when it is.
        fields = tuple(
            torch.from_numpy(self._values[start:stop].copy()) for start, stop in pairwise(offsets)
        )
        return fields if self._fields > 1 else fields[0]

    def lengths(self, field: int = 0) -> NDArray[np.int64]:
        """Return how many values each row has in a field, (R,): for ``Loading(order=)``."""
        every = np.diff(self._offsets).astype(np.int64)
        return every[field :: self._fields]

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokens, (self.path,)  # another process maps it for itself


def write_tokens(
    path: str | Path, rows: Iterable[Row], *, dtype: DTypeLike = np.int32, made_from: str = ""
) -> None:
    """Write a file of tokens, whole or not at all. Blocks until it is on the disk.

    Takes 8 bytes of memory for each field of each row, whatever they hold.

    Args:
        path: in a folder that exists.
        rows: each a list or array of numbers, or a tuple of as many of these as in any other row.
        dtype: of the values.
        made_from: see ``Tokens.built``.

    Raises:
        DataError: there is no row, a row has other fields than the first one, or a value does not
            fit.
        OSError: it cannot be written.
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
    yield _END.pack(*end, _checksum(end, table))


def _fitting(
    parts: Sequence[NDArray[Any]], kind: np.dtype[Any], where: str, first: int, fields: int
) -> NDArray[Any]:
    """Return the values of some rows, one after the other, as they are kept.

    Args:
        parts: a field of a row each.
        kind: of the values.
        where: the file, for messages.
        first: the number of the first row.
        fields: of a row.

    Raises:
        DataError: a value does not fit.
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
    if (found := next(wrong_ones, None)) is None:  # together they had another type: int64, uint64
        return np.concatenate([part.astype(kind) for part in there])
    number, part = found
    row = f"{where}, row {first + number // fields:,}"
    if part.dtype.kind not in kinds:
        raise DataError(row, got=f"values of {part.dtype}", expected=kind.name)
    wrong, fix = part[(part < least) | (part > most)][0], "choose a larger dtype"
    raise DataError(row, got=wrong, expected=f"{least} to {most}", fix=fix)


def _opened(path: Path) -> tuple[NDArray[Any], NDArray[np.int64], int, bytes]:
    """Return values, offsets, K and the hash of what it was made from."""
    expected = "a file of tokens"
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            magic = file.read(len(_MAGIC))
            file.seek(max(0, size - _END.size))
            tail = file.read(_END.size)
            if magic != _MAGIC:
                raise DataError(path, got="another file", expected=expected)
            damaged = DataError(
                path, got="a damaged end", expected=expected, fix="write it again: it was cut"
            )
            if size < len(_MAGIC) + _END.size:
                raise damaged
            *end, checksum = _END.unpack(tail)
            rows, fields, values, name, made_from = end
            name = name.rstrip(b"\0")
            if name.decode("ascii", "replace") not in _TYPES or min(rows, fields, values + 1) < 1:
                raise damaged
            kind = np.dtype(name.decode())
            at = len(_MAGIC) + values * kind.itemsize
            at += -(values * kind.itemsize) % _ALIGNMENT
            if size != at + 8 * (rows * fields + 1) + _END.size:
                raise damaged
            body = np.asarray(np.memmap(file, dtype=np.uint8, mode="r"))
    except FileNotFoundError:
        raise DataError(path, got="no such file", expected=expected) from None
    except OSError as error:
        raise DataError(path, got=error.strerror or error, expected=expected) from error
    table = body[at : size - _END.size]
    if _checksum((*end[:3], name, made_from), table) != checksum:
        raise damaged
    first = len(_MAGIC)
    found: NDArray[Any] = body[first : first + values * kind.itemsize].view(kind)
    return found, table.view("<i8"), fields, made_from


def _checksum(end: Sequence[Any], table: Any) -> int:
    *numbers, name, made_from = end
    head = struct.pack("<qqq8s32s", *numbers, name, made_from)
    crc: int = google_crc32c.value(head)
    for start in range(0, len(table), 1 << 22):
        crc = google_crc32c.extend(crc, bytes(table[start : start + (1 << 22)]))
    return crc


def _digest(made_from: str) -> bytes:
    return hashlib.sha256(made_from.encode()).digest()
