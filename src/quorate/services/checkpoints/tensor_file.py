"""Tensor files: the header of a .safetensors file, checked before the data are read.

    8 bytes   n, little-endian uint64
    n bytes   JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    data      the tensors' elements, contiguous, row-major, little-endian

The size of a file follows from its header, so a file of another size is refused before its data are
read: a sparse file of a terabyte costs nothing. The position of each tensor follows from names,
dtypes and shapes, so several processes can write one file. This module does not import torch: the
import takes longer than inspecting a run.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import msgspec

from quorate.errors import CheckpointError
from quorate.machine.regular_file import open_regular, size_of
from quorate.machine.text import printable
from quorate.services.checkpoints.record import abridged, parsed_json

MOST_HEADER_BYTES = 64 << 20
_MOST_DIMENSIONS = 64  # the maximum of torch's kernels
_MOST_TENSORS = 3 << 19  # in a header: the shortest entry has 43 bytes
_PIECE_BYTES = 1 << 20

# From safetensors' names of dtypes to torch's names, in the order of safetensors' own writer: the
# widest dtype first, so that each tensor is aligned.
_OF_BYTES = {
    8: {"U64": "uint64", "I64": "int64", "F64": "float64", "C64": "complex64"},
    4: {"F32": "float32", "U32": "uint32", "I32": "int32"},
    2: {"BF16": "bfloat16", "F16": "float16", "U16": "uint16", "I16": "int16"},
    1: {
        **{"F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E4M3FNUZ": "float8_e4m3fnuz"},
        **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"},
        **{"I8": "int8", "U8": "uint8", "BOOL": "bool"},
    },
}
TORCH_NAMES = {stored: name for names in _OF_BYTES.values() for stored, name in names.items()}
DTYPES = frozenset(TORCH_NAMES.values())
_BYTES = {stored: size for size, names in _OF_BYTES.items() for stored in names}
_NAMES = {name: stored for stored, name in TORCH_NAMES.items()}
_ORDER = [*TORCH_NAMES]


class Stored(NamedTuple):
    """A tensor in a file: dtype, shape and position."""

    dtype: str  # torch's name: "float32"
    shape: tuple[int, ...]
    start: int  # bytes, from the beginning of the file
    stop: int


class Header(NamedTuple):
    """The content of a file's header."""

    tensors: dict[str, Stored]
    metadata: dict[str, str]
    nbytes: int  # size of the file


def laid_out(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, Stored]]:
    """Return the first bytes of a file of tensors, and the position of each tensor.

    Args:
        tensors: dtypes, in torch's names, and shapes by name.

    Raises:
        ValueError: safetensors has no such dtype.
    """
    for name, (dtype, _) in tensors.items():
        if dtype not in _NAMES:
            raise ValueError(f"{abridged(name)}: got dtype {dtype}, which no .safetensors file has")
    entries: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    places, at = {}, 0
    for name in sorted(tensors, key=lambda n: (_ORDER.index(_NAMES[tensors[n][0]]), n.encode())):
        dtype, shape = tensors[name]
        places[name] = at, (end := at + math.prod(shape) * _BYTES[_NAMES[dtype]])
        offsets = {"data_offsets": [at, end]}
        entries[name] = {"dtype": _NAMES[dtype], "shape": [*shape], **offsets}
        at = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # pad, so that the data are aligned
    begin = len(text).to_bytes(8, "little") + text
    stored = {
        name: Stored(*tensors[name], len(begin) + start, len(begin) + stop)
        for name, (start, stop) in places.items()
    }
    return begin, stored


def header(path: Path) -> Header:
    """Read the header of a file, and check the header against the file's size.

    Raises:
        CheckpointError: the file is not a safetensors file, or is damaged.
        OSError: the file cannot be read, or is not a regular file.
    """
    with open_regular(path) as file:
        return _header(path, file)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a regular file. Memory use does not depend on the file's size.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pieces(path: Path, stored: Stored) -> Iterator[bytes]:
    """Yield the bytes of a tensor, piece by piece.

    Raises:
        CheckpointError: the file ends before the end of the tensor.
    """
    with open_regular(path) as file:
        file.seek(stored.start)
        left = stored.stop - stored.start
        while left:
            piece = file.read(min(left, _PIECE_BYTES))
            if not piece:
                raise CheckpointError(path, "it was cut while it was read")
            left -= len(piece)
            yield piece


def _header(path: Path, file: BufferedReader) -> Header:
    size = size_of(file)
    if size < 8:
        raise CheckpointError(path, got=f"{size} bytes", expected="a safetensors file")
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size - 8, MOST_HEADER_BYTES):
        raise CheckpointError(
            path,
            got=f"a header of {length:,} bytes in a file of {size:,}",
            expected=f"at most {min(size - 8, MOST_HEADER_BYTES):,}",
        )
    try:
        text = file.read(length)
        _require_entries(text)
        entries = parsed_json(text)
        if not isinstance(entries, dict):
            raise ValueError(f"got a {type(entries).__name__}, expected an object")
        metadata = entries.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise ValueError(f"got metadata {abridged(metadata)}, expected strings by name")
        tensors = {name: _stored(name, entry, 8 + length) for name, entry in entries.items()}
    except ValueError as error:
        raise CheckpointError(path, f"its header: {error}") from error
    # The data consist of exactly the tensors, one after another: no gap, no overlap, no trailing
    # bytes.
    at = 8 + length
    for name, stored in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if stored.start != at:
            raise CheckpointError(
                path,
                f"its header: {abridged(name)} begins at byte {stored.start:,}, expected {at:,}",
            )
        at = stored.stop
    if at != size:
        raise CheckpointError(path, got=f"{size:,} bytes", expected=f"{at:,} as its header says")
    return Header(tensors, metadata, size)


def _require_entries(text: bytes) -> None:
    """Refuse a text other than an object of objects, before memory for all entries is allocated.

    Raises:
        ValueError: the text has another structure, or more tensors than a header can describe.
    """
    if (most := text.count(b"{")) > _MOST_TENSORS:
        raise ValueError(f"got {most:,} braces, expected at most {_MOST_TENSORS:,}")
    try:
        msgspec.json.decode(text, type=dict[str, dict[str, str | list[int]]])
    except msgspec.ValidationError as error:
        raise ValueError(f"got no tensors by name: {printable(error)}") from error
    except (msgspec.DecodeError, RecursionError):
        return  # the strict parser reports the fault


def _is_size(number: object) -> bool:
    return type(number) is int and 0 <= number < 1 << 63  # True is an int too


def _stored(name: str, entry: object, data_at: int) -> Stored:
    """Return the tensor described by a header's entry. Raises ``ValueError``."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{abridged(name)}: got {abridged(entry)}, expected dtype, shape, offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BYTES:
        expected = "one of " + ", ".join(_BYTES)
        raise ValueError(f"{abridged(name)}: got dtype {abridged(dtype)}, expected {expected}")
    for numbers, most in ((shape, _MOST_DIMENSIONS), (offsets, 2)):
        if not isinstance(numbers, list) or len(numbers) > most or not all(map(_is_size, numbers)):
            raise ValueError(f"{abridged(name)}: got {abridged(numbers)}, expected whole numbers")
    # torch computes strides with sizes of 0 taken as 1, so an empty shape can overflow too.
    if not _is_size(math.prod(max(size, 1) for size in shape) * _BYTES[dtype]):
        raise ValueError(f"{abridged(name)}: got {abridged(shape)}, expected fewer elements")
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * _BYTES[dtype]:
        raise ValueError(
            f"{abridged(name)}: got {abridged(offsets)}, expected the {dtype} of {abridged(shape)}"
        )
    return Stored(TORCH_NAMES[dtype], tuple(shape), data_at + offsets[0], data_at + offsets[1])
