"""A file of lines of JSON in the run directory, extended by a run during training."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from quorate.errors import UserError
from quorate.machine.regular_file import open_regular
from quorate.machine.valid_json import dumped

MOST_WAITING_BYTES = 16 << 20  # while writing fails; newer lines are lost
LOOK_EVERY_S = 1.0  # interval of the check that the file still has its name


class RunClock:
    """The time of day for the lines of a log: the same clock on all hosts, and never set back.

    Attributes:
        begun_at: the time of day when the clock was made, in seconds since the epoch.
        begun: the same moment by ``time.monotonic()``, which continues the time of day.
    """

    def __init__(self) -> None:
        self.begun_at, self.begun = round(time.time(), 4), time.monotonic()

    def now(self) -> float:
        """Return the time of day, in seconds since the epoch."""
        return round(self.begun_at + time.monotonic() - self.begun, 4)


class LineFile:
    """A file to which lines of JSON are appended. Call ``close`` at the end.

    On a full disk or in a removed directory, lines wait in memory, and are written again with the
    next line. No such failure raises an exception.

    Args:
        path: the path of the file, in an existing folder.
        say: shows a line to the user.
        renew: ``RunLock.renew``, called before the file is made again.
    """

    def __init__(
        self,
        path: Path,
        say: Callable[[str], None],
        renew: Callable[[], None] = lambda: None,
    ) -> None:
        self._path = path
        self._say = say
        self._renew = renew
        # Whole lines, possibly after the rest of a line, or the end of a line cut by a kill.
        self._waiting = bytearray(b"\n" if _ends_in_a_line(path) else b"")
        self._is_in_a_line = False  # whether the first waiting line is partly written
        self._lost = 0  # number of lines
        self._failing: OSError | UserError | None = None
        self._descriptor: int | None = None
        self._looked_at = time.monotonic()
        self._write(b"")

    def close(self) -> None:
        """Close the file, and report lines that could not be written."""
        self._write(b"")
        lost = self._lost + self._waiting.count(b"\n")
        if lost:
            lines = "line" if lost == 1 else f"{lost:,} lines"
            self._say(f"{self._path} lacks the last {lines}: {self._failing}")
        self._close()

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a line with an object; see ``dumped``."""
        self._write(f"{dumped(record)}\n".encode())

    def _write(self, line: bytes) -> None:
        """Append a line, after the lines that wait."""
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
        except (OSError, UserError) as error:  # UserError: the directory belongs to another run now
            if self._failing is None:
                self._say(f"{self._path.name} cannot be written, training continues: {error}")
            self._failing = error
        else:
            if self._failing is not None:
                lost = f", {self._lost:,} lines are lost" if self._lost else ""
                self._say(f"{self._path.name} can be written again{lost}")
            self._failing, self._lost = None, 0

    def _opened(self) -> int:
        """Return a descriptor of the file under the path, which is made again if it was removed."""
        now = time.monotonic()
        if self._descriptor is not None:
            if now - self._looked_at < LOOK_EVERY_S and self._failing is None:
                return self._descriptor
            self._looked_at = now
            if self._has_its_name(self._descriptor):
                return self._descriptor
            self._close()
        self._renew()
        # O_NONBLOCK: opening a FIFO in the file's place would block until there is a reader.
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
            if self._is_in_a_line:  # drop the rest of a line: the rest must not go to a new file
                del self._waiting[: self._waiting.find(b"\n") + 1]
                self._is_in_a_line = False
            with suppress(OSError):  # a network file system reports late errors
                os.close(descriptor)


def _ends_in_a_line(path: Path) -> bool:
    """Return whether the last line of a file has no line end, as a kill may leave it."""
    try:
        with open_regular(path) as file:
            if file.seek(0, 2) == 0:
                return False
            file.seek(-1, 2)
            return file.read(1) != b"\n"
    except OSError:
        return False
