"""IDX files: what is written is read back, and every damage is a DataError that names the file."""

from __future__ import annotations

import gzip
import os
import random
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
TORCH = {
    "u1": torch.uint8,
    "i1": torch.int8,
    "i2": torch.int16,
    "i4": torch.int32,
    "f4": torch.float32,
    "f8": torch.float64,
}


def idx(array: np.ndarray) -> bytes:
    """An array as the bytes of an IDX file."""
    code = CODES[array.dtype.str[1:]]
    header = struct.pack(f">4B{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def sample(code: str, shape: tuple[int, ...]) -> np.ndarray:
    """An array of every kind of byte, so that a wrong byte order cannot go unseen."""
    raw = np.random.default_rng(7).integers(-100, 100, shape)
    return (raw * (1.25 if code[0] == "f" else 1)).astype(code)


def reads(path: Path) -> torch.Tensor | None:
    """The tensor, or None after a DataError of one line that names the file."""
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
    for shape in [(5,), (3, 4), (7, 2, 3), (2, 1, 3, 2), (0,), (4, 0, 3)]:
        array = sample(code, shape)
        for content in (idx(array), gzip.compress(idx(array))):
            path.write_bytes(content)
            tensor = read_idx(str(path))
            assert tensor.dtype == TORCH[code]
            assert tuple(tensor.shape) == shape
            assert torch.equal(tensor, torch.from_numpy(array))
            tensor.add_(1)  # its memory is its own
            assert torch.equal(read_idx(path), torch.from_numpy(array))


def test_larger_than_one_piece(tmp_path: Path) -> None:
    array = sample("i2", (300, 28, 28))
    for content in (idx(array), gzip.compress(idx(array))):
        (tmp_path / "f").write_bytes(content)
        assert torch.equal(read_idx(tmp_path / "f"), torch.from_numpy(array))


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
    os.mkfifo(tmp_path / "pipe")  # opening it for reading would wait for ever
    for name in ("absent", ".", "pipe"):
        with expect_error(DataError, where=tmp_path / name):
            read_idx(tmp_path / name)


def test_cut_at_every_length_and_extended(tmp_path: Path) -> None:
    path = tmp_path / "f"
    plain = idx(sample("i2", (4, 3, 5)))
    packed = gzip.compress(plain)
    for whole in (plain, packed):
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            assert reads(path) is None, length
        for tail in (b"\1", b"\1" * 7, whole):
            path.write_bytes(whole + tail)
            assert reads(path) is None, tail


def test_every_flipped_bit_of_the_header(tmp_path: Path) -> None:
    path = tmp_path / "f"
    array = sample("u1", (4, 3, 5))
    whole = idx(array)
    for bit in range(8 * 16):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        tensor = reads(path)
        # Only u1 -> i1 has the same size in bytes; every other flip must be noticed.
        assert (tensor is not None) == (bit == 8 * 2), bit
        if tensor is not None:
            assert torch.equal(tensor, torch.from_numpy(array.view("i1")))


def test_every_flipped_byte_of_a_gzip_stream(tmp_path: Path) -> None:
    path = tmp_path / "f"
    array = sample("u1", (4, 3, 5))
    whole = gzip.compress(idx(array), mtime=0)
    for at in range(len(whole)):
        for mask in (0x01, 0x10, 0xFF):
            damaged = bytearray(whole)
            damaged[at] ^= mask
            path.write_bytes(damaged)
            tensor = reads(path)
            # Time, system and hints of the gzip header are nobody's data; the CRC guards the rest.
            assert tensor is None or at < 10, (at, mask)
            assert tensor is None or torch.equal(tensor, torch.from_numpy(array))


def test_random_headers(tmp_path: Path) -> None:
    path = tmp_path / "f"
    chance = random.Random(11)
    for _ in range(500):
        count = chance.randrange(6)
        sizes = [chance.choice([0, 1, 2, 3, 255, 1 << 16, (1 << 32) - 1]) for _ in range(count)]
        code = chance.choice([*CODES.values(), 0x0A])
        data = chance.randbytes(chance.randrange(40))
        content = struct.pack(f">4B{count}I", 0, 0, code, count, *sizes) + data
        path.write_bytes(chance.choice([content, gzip.compress(content, 1)]))
        tensor = reads(path)
        if tensor is not None:
            assert list(tensor.shape) == sizes
            assert tensor.numel() * tensor.element_size() == len(data)


def test_random_bytes(tmp_path: Path) -> None:
    path = tmp_path / "f"
    chance = random.Random(12)
    for start in (b"", b"\0\0", b"\x1f\x8b", b"\x1f\x8b\x08\0\0\0\0\0\0\3"):
        for _ in range(100):
            path.write_bytes(start + chance.randbytes(chance.randrange(60)))
            reads(path)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_a_lying_header_allocates_nothing(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "f"
    for sizes in ([(1 << 31) - 1], [1 << 20, 1 << 20], [(1 << 32) - 1, (1 << 31) - 1]):
        content = struct.pack(f">4B{len(sizes)}I", 0, 0, 8, len(sizes), *sizes) + b"few"
        path.write_bytes(gzip.compress(content) if packed else content)
        tracemalloc.start()
        try:
            assert reads(path) is None
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def test_a_small_header_before_a_gzip_bomb(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(gzip.compress(idx(sample("u1", (3,))) + bytes(64 << 20), 1))
    tracemalloc.start()
    try:
        assert reads(path) is None
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_the_offset_in_a_damaged_gzip_stream_counts_content(tmp_path: Path) -> None:
    path = tmp_path / "f"
    array = sample("u1", (1 << 20,))
    packed = gzip.compress(idx(array))
    path.write_bytes(packed[:-6])  # all data, half a checksum
    with expect_error(DataError):
        read_idx(path)
