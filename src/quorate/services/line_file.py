"""A file of lines in the run directory that a run appends to while it trains."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from quorate.errors import UserError

MOST_WAITING_BYTES = 16 << 20  # while nothing can be written; what is newer is lost
LOOK_EVERY_S = 1.0  # whether the file still has its name


class LineFile:
    """Appends lines to a file; ``close`` it.

    What cannot be written waits in memory, on a disk that is full or a directory that was removed,
    and is tried again with each line. Nothing of that raises.

    Args:
        path: of the file, in a folder that is there.
        say: shows a line to the user.
        renew: ``RunLock.renew``, called before the file is made again.
        ends_in_a_line: whether the last line in the file has no line end.
    """

    def __init__(
        self,
        path: Path,
        say: Callable[[str], None],
        renew: Callable[[], None] = lambda: None,
        *,
        ends_in_a_line: bool = False,
    ) -> None:
        self._path = path
        self._say = say
        self._renew = renew
        # Whole lines, or the rest of one and whole lines.
        self._waiting = bytearray(b"\n" if ends_in_a_line else b"")
        self._is_in_a_line = False  # the first of them was begun in the file
        self._lost = 0  # lines
        self._failing: OSError | UserError | None = None
        self._descriptor: int | None = None
        self._looked_at = time.monotonic()
        self.write(b"")

    def close(self) -> None:
        """Close the file. If something could not be written, that is said."""
        self.write(b"")
        lost = self._lost + self._waiting.count(b"\n")
        if lost:
            lines = "line" if lost == 1 else f"{lost:,} lines"
            self._say(f"{self._path} lacks the last {lines}: {self._failing}")
        self._close()

    def write(self, line: bytes) -> None:
        """Append a line, with its line end."""
        if len(self._waiting) + len(line) <= MOST_WAITING_BYTES:
            self._waiting += line
        else:
            self._lost += 1
        try:
            self._descriptor = self._opened()
            while self._waiting:
                written = os.write(self._descriptor, self._waiting)
                self._is_in_a_line = not self._waiting.endswith(b"\n", 0, written)
                del self._waiting[:written]
        except (OSError, UserError) as error:  # the latter: the directory is another run's now
            if self._failing is None:
                self._say(f"{self._path.name} cannot be written, training continues: {error}")
            self._failing = error
        else:
            if self._failing is not None:
                lost = f", {self._lost:,} lines are lost" if self._lost else ""
                self._say(f"{self._path.name} can be written again{lost}")
            self._failing, self._lost = None, 0

    def _opened(self) -> int:
        """Return a descriptor of the file that has the name, which may have been removed."""
        now = time.monotonic()
        if self._descriptor is not None:
            if now - self._looked_at < LOOK_EVERY_S and self._failing is None:
                return self._descriptor
            self._looked_at = now
            if self._has_its_name(self._descriptor):
                return self._descriptor
            self._close()
        self._renew()
        # O_NONBLOCK: a FIFO in its place would wait for a reader.
        how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
        descriptor = os.open(self._path, how, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file", str(self._path))
        return descriptor

    def _has_its_name(self, descriptor: int) -> bool:
        own = os.fstat(descriptor)
        try:
            return os.path.samestat(self._path.stat(), own)
        except OSError:
            return own.st_nlink > 0  # the directory was moved, and the log with it

    def _close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            if self._is_in_a_line:  # its rest belongs to no other file
                del self._waiting[: self._waiting.find(b"\n") + 1]
                self._is_in_a_line = False
            with suppress(OSError):  # of what is on its way to a server; it was said, or never is
                os.close(descriptor)
