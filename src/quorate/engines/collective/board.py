"""The board: where each rank tells that it lives, and reads what the others told.

Ranks of one machine have a small file that all map. No lock: whoever held it might be stopped.
"""

from __future__ import annotations

import mmap
import time
from pathlib import Path
from typing import Protocol

from quorate.engines.collective.beat import MOST_BYTES, Beat
from quorate.engines.collective.judge import Heard
from quorate.engines.two_copies import TwoCopies

_SLOT = TwoCopies.room(MOST_BYTES)  # bytes of each rank


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
        self._rank = rank
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), size * _SLOT)
        self._beats = [TwoCopies(memory, each * _SLOT, MOST_BYTES) for each in range(size)]

    @staticmethod
    def nbytes(size: int) -> int:
        """Return how many bytes a board for so many ranks has."""
        return size * _SLOT

    def tell(self, beat: Beat) -> None:
        """See ``Board``; one thread at a time."""
        own = self._beats[self._rank]
        own.write(own.read()[0] + 1, beat.packed())

    def heard(self) -> Heard:
        """See ``Board``."""
        texts = [copies.read()[1] for copies in self._beats]
        beats = [Beat.unpacked(text) if text else None for text in texts]
        return Heard(beats, time.monotonic(), "the file of the ranks")

    def close(self) -> None:
        """See ``Board``: somebody may read it yet."""
