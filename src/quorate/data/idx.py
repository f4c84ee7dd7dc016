"""IDX, the file format of MNIST: a header with sizes, then one dense array.

    bytes  0  0  TYPE  D      TYPE: 08 u8, 09 i8, 0B i16, 0C i32, 0D f32, 0E f64
    sizes  D numbers, big-endian uint32
    data   the product of the sizes, row-major, big-endian

A file may be gzip-compressed. The first two bytes of the file decide, not the name. Offsets in
error messages count bytes of the uncompressed content.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from quorate.errors import DataError
from quorate.machine.regular_file import open_regular
from quorate.machine.resources import too_large

GZIP_MAGIC = b"\x1f\x8b"

_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MOST_DIMENSIONS = 64  # the maximum of torch's kernels and of NumPy
_PIECE_BYTES = 1 << 16


def read_idx(path: str | Path) -> torch.Tensor:
    """Read an IDX file, plain or gzip-compressed.

    Returns:
        A tensor with the sizes of the header, in native byte order and in its own memory: uint8,
        int8, int16, int32, float32 or float64. A size of 0 gives an empty tensor.

    Raises:
        DataError: the file is missing, damaged, cut short, too long, or not an IDX file.
    """
    path = Path(path)
    try:
        with open_regular(path) as file:
            compressed = file.read(2) == GZIP_MAGIC
            file.seek(0)
            if not compressed:
                return _FileContent(path, file).tensor()
            with gzip.GzipFile(fileobj=file) as unpacked:
                return _FileContent(path, unpacked).tensor()
    except FileNotFoundError:
        raise DataError(path, got="no such file", expected="an IDX file") from None
    except OSError as error:
        raise DataError(path, got=error.strerror or error, expected="a readable file") from error


class _FileContent:
    """The uncompressed content of a file, read from front to back.

    A size in the header is trusted only after so many bytes have arrived: memory grows with the
    actual content of the file, not with its header.
    """

    def __init__(self, path: Path, stream: BinaryIO | gzip.GzipFile) -> None:
        self.path = path
        self.stream = stream
        self.at = 0  # bytes of content read so far

    def tensor(self) -> torch.Tensor:
        """Return the whole content as a tensor. Raises ``DataError``."""
        # 1. The header.
        magic = self._take(4)
        if not magic:
            raise self._wrong("an empty file", "an IDX file", 0)
        if len(magic) < 4:
            raise self._wrong(f"the end of the file: {magic.hex(' ')}", "4 bytes of magic", self.at)
        if magic[:2] != b"\0\0":
            raise self._wrong(magic.hex(" "), "00 00, a type code and a number of dimensions", 0)
        if magic[2] not in _DTYPES:
            known = ", ".join(f"{code:02x}" for code in _DTYPES)
            raise self._wrong(f"type code {magic[2]:02x}", f"one of {known}", 2)
        if not 1 <= magic[3] <= _MOST_DIMENSIONS:
            raise self._wrong(f"{magic[3]} dimensions", f"1 to {_MOST_DIMENSIONS}", 3)
        table = self._take(4 * magic[3])
        if len(table) < 4 * magic[3]:
            raise self._wrong("the end of the file", f"{magic[3]} sizes of 4 bytes", self.at)
        sizes = struct.unpack(f">{magic[3]}I", table)
        dtype = np.dtype(_DTYPES[magic[2]])
        shape = f"{' x '.join(map(str, sizes))} {dtype.newbyteorder('=')}"
        # torch computes strides with sizes of 0 taken as 1, so an empty shape can overflow too.
        if math.prod(max(size, 1) for size in sizes) * dtype.itemsize >= 1 << 63:
            raise self._wrong(shape, "sizes whose product fits into 63 bits", 4)

        # 2. The data, and no trailing bytes. A compressed file of zeros is a thousandth of its
        # content, and the data are held twice during the conversion of the byte order: check the
        # memory first.
        due = math.prod(sizes) * dtype.itemsize
        if reason := too_large(2 * due):
            raise self._wrong(shape, f"a tensor that fits: it takes {reason}", 4)
        data = self._take(due)
        if len(data) < due:
            got = f"the end of the file after {len(data):,} bytes of data"
            raise self._wrong(got, f"{due:,} bytes ({shape})", self.at)
        if self._take(1):
            raise self._wrong("more bytes", f"the end of the file ({shape})", self.at - 1)

        # 3. Native byte order, in memory owned by the tensor.
        flat = np.frombuffer(data, dtype).astype(dtype.newbyteorder("="))
        return torch.from_numpy(flat).reshape(sizes)

    def _take(self, count: int) -> bytearray:
        """Read the next ``count`` bytes, or all remaining bytes if fewer."""
        taken = bytearray()
        while len(taken) < count:
            try:
                piece = self.stream.read(min(count - len(taken), _PIECE_BYTES))
            except (zlib.error, EOFError, gzip.BadGzipFile) as error:
                got = f"a damaged or cut gzip stream ({error}), sound up to about here unpacked"
                raise self._wrong(got, "a whole gzip stream", self.at) from error
            if not piece:
                break
            taken += piece
            self.at += len(piece)
        return taken

    def _wrong(self, got: str, expected: str, offset: int) -> DataError:
        return DataError(self.path, got=got, expected=expected, offset=offset)
