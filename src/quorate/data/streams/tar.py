"""Tar files as a map-style dataset: consecutive members with the same key form a row."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from quorate.data.indexed_files import Arrays, Indexed, IndexedFiles, Kind, Paths, indexed, paths_of
from quorate.errors import DataError

BLOCK = 512
KEY = "__key__"
_LISTED = "\0"  # separates the kinds of members; no name contains it
# WebDataset's rules for the key and the kind of a member, and for skipped members: members without
# a kind, and notes of its writers about a whole file.
_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
_ABOUT_ALL = re.compile(r"__[^/]*__($|/)")

Members = dict[str, Any]


class TarDataset(IndexedFiles):
    """The rows of one or more tar files in the layout of WebDataset.

    Consecutive members with the same key form a row. The key is the path up to the first dot of the
    file name: ``a/0001.jpg`` and ``a/0001.cls`` are two entries of row ``a/0001``. As in
    WebDataset, the part after that dot becomes lower case, and members without such a dot, or with
    a name that begins with ``__name__``, are skipped.

    The first use of a file reads all its headers and stores an index next to the file. Any row can
    then be read by number, with one read per member.

    Args:
        files: a path, or a list of paths.
        decode: a function from ``{"__key__": "a/0001", "jpg": bytes, "cls": bytes}`` to a sample.
            Default: the dict is the sample.

    Raises:
        DataError: a file is missing, compressed, cut short or not a tar file; a row contains a
            link, or two members with the same name; or all files together have no row.
    """

    def __init__(self, files: Paths, decode: Callable[[Members], Any] | None = None) -> None:
        self._decode = decode
        found = [indexed(path, KIND) for path in paths_of(files)]
        self._kinds = [_texts(file.arrays["kinds"]).split(_LISTED) for file in found]
        self._number_of = {file.path: number for number, file in enumerate(found)}
        super().__init__(found, [len(file.arrays["firsts"]) - 1 for file in found])

    def _sample(self, file: Indexed, fd: int, row: int) -> Any:
        arrays, kinds = file.arrays, self._kinds[self._number_of[file.path]]
        first, last = arrays["firsts"][row : row + 2].tolist()
        start, stop = arrays["keys_at"][row : row + 2].tolist()
        key = _texts(arrays["keys"][start:stop])
        members: Members = {KEY: key}
        for member in range(first, last):
            kind = kinds[int(arrays["kind_of"][member])]
            at, size = int(arrays["offsets"][member]), int(arrays["sizes"][member])
            members[kind] = file.read(fd, at, size, f"{file.path}, {key}.{kind}")
        if self._decode is None:
            return members
        try:
            return self._decode(members)
        except Exception as error:
            error.add_note(f"quorate: in {file.path}, {key} (row {row:,})")
            raise


def _texts(array: Any) -> str:
    return bytes(array).decode("utf-8", "surrogateescape")


def _scan(path: Path, file: BinaryIO, size: int) -> Arrays:
    """Read all headers, and group members into rows."""
    firsts: list[int] = []
    keys: list[bytes] = []
    offsets: list[int] = []
    sizes: list[int] = []
    kind_of: list[int] = []
    kinds: dict[str, int] = {}
    seen: set[str] = set()  # kinds in the current row
    at = 0  # end of the last member
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # tarfile keeps all members
                stored = member.size if member.isreg() else 0
                at = member.offset_data + stored + -stored % BLOCK
                name = f"{path}, {member.name}"
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    got, expected = "a link, or another kind of member", "a file"
                    raise DataError(name, got=got, expected=expected, offset=member.offset)
                if member.offset_data + stored > size:
                    got = f"the end of the file after {size - member.offset_data:,} bytes"
                    raise DataError(
                        *(name,),
                        got=got,
                        expected=f"{stored:,} bytes, as its header says",
                        offset=member.offset_data,
                        fix="the file was cut: get it again",
                    )
                parted = _NAME.fullmatch(member.name)
                if parted is None or _ABOUT_ALL.match(member.name):
                    continue
                key, kind = os.fsencode(parted[1]), parted[2].lower()
                if not keys or key != keys[-1]:
                    firsts.append(len(offsets))
                    keys.append(key)
                    seen = set()
                if kind in seen:
                    got, expected = "two members of this name in a row", "one"
                    raise DataError(name, got=got, expected=expected, offset=member.offset)
                seen.add(kind)
                offsets.append(member.offset_data)
                sizes.append(stored)
                kind_of.append(kinds.setdefault(kind, len(kinds)))
    except tarfile.TarError as error:
        got = f"no tar file ({error})"
        raise DataError(path, got=got, expected=KIND.name, offset=at) from error
    # Python's reader silently ends an archive at a damaged header: check for the end block.
    if os.pread(file.fileno(), BLOCK, at) != bytes(BLOCK):
        got = "a damaged header, or the end of the file"
        expected = "a member, or the end of an archive"
        fix = "the file was cut or damaged: get it again"
        raise DataError(path, got=got, expected=expected, offset=at, fix=fix)
    return {
        "firsts": np.array([*firsts, len(offsets)], dtype=np.int64),
        "keys_at": np.cumsum([0, *map(len, keys)], dtype=np.int64),
        "keys": np.frombuffer(b"".join(keys), dtype=np.uint8),
        "kinds": np.frombuffer(os.fsencode(_LISTED.join(kinds)), dtype=np.uint8),
        "kind_of": np.array(kind_of, dtype=np.int32),
        "offsets": np.array(offsets, dtype=np.int64),
        "sizes": np.array(sizes, dtype=np.int64),
    }


def _fits(arrays: Arrays, size: int) -> bool:
    """Return whether arrays are possible rows and members of a tar file.

    R rows, M members: ``firsts`` and ``keys_at`` are (R + 1,), ``offsets``, ``sizes`` and
    ``kind_of`` (M,).
    """
    firsts, keys_at, keys = arrays["firsts"], arrays["keys_at"], arrays["keys"]
    offsets, sizes, kind_of = arrays["offsets"], arrays["sizes"], arrays["kind_of"]
    kinds = bytes(arrays["kinds"]).split(os.fsencode(_LISTED))
    return (
        len(firsts) == len(keys_at) >= 1
        and len(offsets) == len(sizes) == len(kind_of)
        and _rises(firsts, len(offsets))
        and _rises(keys_at, len(keys))
        and len(set(kinds)) == len(kinds)
        and bool(((kind_of >= 0) & (kind_of < len(kinds))).all())
        # Bound every number by the size of the file first: then no difference overflows.
        and bool(((offsets >= BLOCK) & (offsets <= size) & (sizes >= 0)).all())
        and bool((sizes <= size - offsets).all())
        # A member's header lies between two members.
        and bool((offsets[1:] - offsets[:-1] - BLOCK >= sizes[:-1]).all())
    )


def _rises(bounds: NDArray[np.int64], end: int) -> bool:
    """Return whether bounds increase strictly from 0 to an end."""
    return bounds[0] == 0 and bounds[-1] == end and bool((bounds[1:] > bounds[:-1]).all())


KIND = Kind(
    "a tar file",
    {
        **{"firsts": "<i8", "keys_at": "<i8", "keys": "|u1", "kinds": "|u1"},
        **{"kind_of": "<i4", "offsets": "<i8", "sizes": "<i8"},
    },
    _scan,
    _fits,
)
