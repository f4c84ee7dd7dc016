"""Regular files: opened without waiting, and read up to a bound.

A folder that others can write to may hold anything under a name that a run reads: a FIFO, which
blocks whoever opens it, a device without an end, a socket, a sparse file of a terabyte. A link is
followed, as users put files on other disks; what it leads to has to be a regular file all the same.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
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


def regular_descriptor(path: str | Path) -> int:
    """Return a descriptor for reading a regular file, which the caller closes. Does not block.

    Raises:
        OSError: the file is not there, cannot be read, or is no regular file; the error's text
            says what it is.
    """
    # Before the opening too: that of some devices has an effect (a tape is rewound).
    _require_regular(Path(path).stat(), path)
    descriptor = os.open(path, os.O_RDONLY | _AT_ONCE)
    try:
        _require_regular(os.fstat(descriptor), path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_regular(path: str | Path) -> BufferedReader:
    """Open a regular file for reading bytes. Does not block, whatever is there.

    Raises:
        OSError: see ``regular_descriptor``.
    """
    return os.fdopen(regular_descriptor(path), "rb")


def regular_lines(path: str | Path, most_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a regular file with their ends, in memory for one of them.

    Args:
        path: of the file.
        most_bytes: of a line with its end. A sparse file of a terabyte is one line.

    Raises:
        OSError: see ``regular_descriptor``; or a line is longer.
    """
    with open_regular(path) as file:
        while line := file.readline(most_bytes + 1):
            if len(line) > most_bytes:
                raise _too_large(f"a line of more than the {most_bytes:,} bytes", path)
            yield line


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
        raise _too_large(f"more than the {most_bytes:,} bytes", path)
    return data


def _too_large(got: str, path: str | Path) -> OSError:
    return OSError(errno.EFBIG, f"{got} that it may have", str(path))


def _require_regular(found: os.stat_result, path: str | Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise OSError(errno.EINVAL, f"{kind}, not a regular file", str(path))


def is_file(path: str | Path) -> bool:
    """Return whether a path leads to a regular file that can be reached."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: str | Path) -> bool:
    """Return whether a path leads to a folder that can be reached."""
    return os.path.isdir(path)  # noqa: PTH112


def exists(path: str | Path) -> bool:
    """Return whether a path leads to anything that can be reached."""
    return os.path.exists(path)  # noqa: PTH110


def reason_against_new_file(path: Path) -> str | None:
    """Return why no file of this path can be made: its name is too long, say; None: it may be."""
    try:
        path.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror or str(error)
    return None
