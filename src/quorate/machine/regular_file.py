"""Regular files: opened without blocking, and read up to a bound.

A folder writable by others may hold anything under a name that a run reads: a FIFO, whose opening
blocks, an endless device, a socket, a sparse file of a terabyte. Links are followed, because users
keep files on other disks; the target has to be a regular file all the same.
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
# Without these flags, opening a FIFO blocks until there is a writer. Regular files are unaffected.
_AT_ONCE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_CLOEXEC", 0)


def regular_descriptor(path: str | Path) -> int:
    """Return a descriptor for reading a regular file; the caller closes it. Does not block.

    Raises:
        OSError: the file is missing, unreadable, or no regular file; the error names the kind.
    """
    # Check before opening too: opening some devices has an effect (a tape is rewound).
    _require_regular(Path(path).stat(), path)
    descriptor = os.open(path, os.O_RDONLY | _AT_ONCE)
    try:
        _require_regular(os.fstat(descriptor), path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_regular(path: str | Path) -> BufferedReader:
    """Open a regular file for reading bytes. Does not block, whatever the path names.

    Raises:
        OSError: see ``regular_descriptor``.
    """
    return os.fdopen(regular_descriptor(path), "rb")


def regular_lines(path: str | Path, most_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a regular file with their ends, with one line in memory at a time.

    Args:
        path: the path of the file.
        most_bytes: bound of a line with its end. A sparse file of a terabyte is one line.

    Raises:
        OSError: see ``regular_descriptor``; or a line is longer.
    """
    with open_regular(path) as file:
        while line := file.readline(most_bytes + 1):
            if len(line) > most_bytes:
                raise _too_large(f"a line of more than the {most_bytes:,} bytes", path)
            yield line


def size_of(file: BufferedReader) -> int:
    """Return the current size of an open file in bytes."""
    return os.fstat(file.fileno()).st_size


def read_regular(path: str | Path, most_bytes: int) -> bytes:
    """Read a whole regular file.

    Args:
        path: the path of the file.
        most_bytes: bound of the size; a larger file is not read completely.

    Raises:
        OSError: see ``open_regular``; or the file is larger.
    """
    with open_regular(path) as file:  # a growing file: reads one byte more than its first size
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
    """Return whether a path leads to a reachable regular file."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: str | Path) -> bool:
    """Return whether a path leads to a reachable folder."""
    return os.path.isdir(path)  # noqa: PTH112


def exists(path: str | Path) -> bool:
    """Return whether a path leads to any reachable file."""
    return os.path.exists(path)  # noqa: PTH110


def reason_against_new_file(path: Path) -> str | None:
    """Return why a new file cannot have this path, such as a name too long; None if it can."""
    try:
        path.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror or str(error)
    return None
