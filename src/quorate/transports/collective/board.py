"""The board: where each rank tells that it lives, and reads what the others told.

Ranks of one machine have a small file that all map. No lock: whoever held it might be stopped.
"""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path
from typing import Protocol

from quorate.transports.collective.beat import MOST_BYTES, Beat
from quorate.transports.collective.judge import Heard

_VERSION = struct.Struct("<q")
_ENTRY = 2048  # bytes: version, length, text
_HEAD = struct.Struct("<q")
_SLOT = 2 * _ENTRY  # the copy with the higher version counts; the other one is written


class Board(Protocol):
    """Where ranks tell and read. Nothing of it blocks but ``close``."""

    session: str  # what only these ranks know; "" as long as they have not met

    def tell(self, beat: Beat) -> None:
        """Have the others hear a beat of this rank, soon."""

    def heard(self) -> Heard:
        """Return the newest of all ranks."""

    def close(self) -> None:
        """Leave it, when the last beat was told. Blocks for a moment."""


class FileBoard:
    """A board in a file that all ranks of one machine map; it works on when its name is gone.

    Args:
        path: of a file of ``nbytes`` zeros.
        rank: of this process.
    """

    session = "0"  # each start of ranks has a file of its own

    def __init__(self, path: Path, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), size * _SLOT)

    @staticmethod
    def nbytes(size: int) -> int:
        """Return how many bytes a board for so many ranks has."""
        return size * _SLOT

    def tell(self, beat: Beat) -> None:
        """See ``Board``; one thread at a time."""
        text = beat.packed()
        version = max(self._version(self._rank, copy) for copy in (0, 1)) + 1
        start = self._start(self._rank, version % 2)
        entry = _HEAD.pack(len(text)) + text
        self._memory[start + _VERSION.size : start + _VERSION.size + len(entry)] = entry
        self._memory[start : start + _VERSION.size] = _VERSION.pack(version)  # it counts from here

    def heard(self) -> Heard:
        """See ``Board``."""
        beats = [self._newest(rank) for rank in range(self._size)]
        return Heard(beats, time.monotonic(), "the file of the ranks")

    def close(self) -> None:
        """See ``Board``: somebody may read it yet."""

    def _newest(self, rank: int) -> Beat | None:
        while True:
            version, copy = max((self._version(rank, copy), copy) for copy in (0, 1))
            if version == 0:
                return None
            start = self._start(rank, copy) + _VERSION.size
            (size,) = _HEAD.unpack_from(self._memory, start)
            text = self._memory[start + _HEAD.size : start + _HEAD.size + min(size, MOST_BYTES)]
            # A copy is written again only when the other one has been.
            if self._version(rank, 1 - copy) <= version:
                return Beat.unpacked(text)

    def _version(self, rank: int, copy: int) -> int:
        (version,) = _VERSION.unpack_from(self._memory, self._start(rank, copy))
        return int(version)

    def _start(self, rank: int, copy: int) -> int:
        return rank * _SLOT + copy * _ENTRY
