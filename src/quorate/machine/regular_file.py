"""Regular files: opened without waiting, and read up to a bound.

A folder that others can write to may hold anything under a name that a run reads: a FIFO, which
blocks whoever opens it, a device without an end, a socket, a sparse file of a terabyte. A link is
followed, as users put files on other disks; what it leads to has to be a regular file all the same.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}
# Without it opening a FIFO waits for whoever writes to it. It changes nothing for regular files.
_AT_ONCE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_CLOEXEC", 0)


def open_regular(path: str | Path) -> BufferedReader:
    """Open a regular file for reading bytes. Does not block, whatever is there.

    Raises:
        OSError: it is not there, cannot be read, or is no regular file; its text says what it is.
    """
    # Before the opening too: that of some devices has an effect (a tape is rewound).
    _require_regular(Path(path).stat(), path)
    file = os.fdopen(os.open(path, os.O_RDONLY | _AT_ONCE), "rb")
    try:
        _require_regular(os.fstat(file.fileno()), path)
    except BaseException:
        file.close()
        raise
    return file


def size_of(file: BufferedReader) -> int:
    """Return how many bytes an open file has now."""
    return os.fstat(file.fileno()).st_size


def read_regular(path: str | Path, most_bytes: int) -> bytes:
    """Read a whole regular file.

    Args:
        most_bytes: a larger one is not read.

    Raises:
        OSError: see ``open_regular``; or it is larger.
    """
    with open_regular(path) as file:  # it may grow: no more is read than there was, and one byte
        data = file.read(min(size_of(file), most_bytes) + 1)
    if len(data) > most_bytes:
        reason = f"more than the {most_bytes:,} bytes that it may have"
        raise OSError(errno.EFBIG, reason, str(path))
    return data


def _require_regular(found: os.stat_result, path: str | Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise OSError(errno.EINVAL, f"{kind}, where a regular file is expected", str(path))
