"""IDX files: written arrays are read back, and every damage is a DataError with the file's name."""

import gzip
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from support.messages import expect_error

from quorate.data.idx import read_idx
from quorate.errors import DataError

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx(array: np.ndarray) -> bytes:
    """An array as the bytes of an IDX file."""
    code = CODES[array.dtype.str[1:]]
    header = struct.pack(f">4B{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def sample(code: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of every kind of byte, so a wrong byte order cannot go unseen."""
    raw = np.random.default_rng(7).integers(-100, 100, shape)
    return (raw * (1.25 if code[0] == "f" else 1)).astype(code)


def reads(path: Path) -> torch.Tensor | None:
    """Return the tensor, or None after a DataError of one line with the file's name."""
    try:
        return read_idx(path)
    except DataError as error:
        told = str(error)
    assert str(path) in told
    assert "\n" not in told
    return None


@pytest.mark.parametrize("code", CODES)
def test_round_trip(tmp_path: Path, code: str) -> None:
    path = tmp_path / "any.name"
    for shape in ((5,), (7, 2, 3), (2, 1, 3, 2), (0,), (4, 0, 3)):
        array = sample(code, shape)
        for content in (idx(array), gzip.compress(idx(array))):
            path.write_bytes(content)
            tensor = read_idx(str(path))
            assert tensor.dtype == getattr(torch, np.dtype(code).name)
            assert tuple(tensor.shape) == shape
            assert torch.equal(tensor, torch.from_numpy(array))
            tensor.add_(1)  # the tensor shares no memory
            assert torch.equal(read_idx(path), torch.from_numpy(array))


@pytest.mark.parametrize(
    ("offset", "content"),
    [
        (0, b""),
        (3, b"\0\0\x08"),
        (0, b"\0\1\x08\1\0\0\0\0"),
        (2, b"\0\0\x0a\1\0\0\0\0"),
        (3, b"\0\0\x08\0\5"),
        (3, b"\0\0\x08\x41" + b"\0\0\0\1" * 65 + b"x"),
        (10, b"\0\0\x08\2\0\0\0\1\0\0"),
        (11, b"\0\0\x0b\1\0\0\0\2abc"),
        (10, b"\0\0\x08\1\0\0\0\2abc"),
        (8, b"\0\0\x08\1\0\0\0\0a"),
        (4, b"\0\0\x0e\3" + b"\xff" * 12),
        (4, b"\0\0\x08\4" + b"\xff" * 12 + b"\0\0\0\0"),
    ],
)
def test_damage_is_told(tmp_path: Path, offset: int | None, content: bytes) -> None:
    path = tmp_path / "damaged"
    for packed in (False, True):
        path.write_bytes(gzip.compress(content) if packed else content)
        with expect_error(DataError, where=path, offset=offset):
            read_idx(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening the pipe for reading would wait for ever
    for name in ("absent", ".", "pipe"):
        with expect_error(DataError, where=tmp_path / name):
            read_idx(tmp_path / name)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("sizes", [[(1 << 31) - 1], [1 << 20, 1 << 20], [(1 << 32) - 1] * 2])
def test_a_lying_header_allocates_nothing(
    tmp_path: Path, sizes: list[int], is_packed: bool
) -> None:
    content = struct.pack(f">4B{len(sizes)}I", 0, 0, 8, len(sizes), *sizes) + b"few"
    (tmp_path / "f").write_bytes(gzip.compress(content) if is_packed else content)
    tracemalloc.start()
    try:
        assert reads(tmp_path / "f") is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("is_packed", [False, True])
def test_cut_at_every_length_extended_and_with_a_flipped_bit(
    tmp_path: Path, is_packed: bool
) -> None:
    path, array = tmp_path / "f", sample("u1", (4, 3, 5))
    whole = gzip.compress(idx(array), mtime=0) if is_packed else idx(array)
    for damaged in (*(whole[:length] for length in range(len(whole))), whole + b"\1", whole * 2):
        path.write_bytes(damaged)
        assert reads(path) is None, damaged
    # Without a checksum only the header shows damage, where u1 -> i1 has the same size in bytes.
    # Time, system and hints of the gzip header are nobody's data.
    for at in range(len(whole) if is_packed else 16):
        for bit in (4,) if is_packed else range(8):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            if (tensor := reads(path)) is not None:
                assert at < 10 if is_packed else (at, bit) == (2, 0)
                expected = array if is_packed else array.view("i1")
                assert torch.equal(tensor, torch.from_numpy(expected))
