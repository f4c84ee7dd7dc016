"""What the script's own process has and its workers have not: its input, and files that it writes.

Its workers are told of it when they start. They run the same script, so that they will come to the
same ``input()`` and to the same ``open("train.log", "w")``.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

MOST = 256  # files of which workers are told

Identity = tuple[int, int]  # device and inode: a file has several names


def facts() -> dict[str, Any]:
    """Return what workers are told, as JSON."""
    return {"has_input": _has_input(), "writes": sorted({*_written()})[:MOST]}


def identity(status: os.stat_result) -> Identity:
    """Return by what a file is known in all processes of a machine."""
    return status.st_dev, status.st_ino


def _has_input() -> bool:
    """Whether standard input may have something: it is not closed, and not /dev/null."""
    try:
        return os.fstat(0).st_rdev != os.stat(os.devnull).st_rdev  # noqa: PTH116
    except OSError:
        return False


def _written() -> Iterator[Identity]:
    """Yield the regular files that are open for writing; none where there is no /proc."""
    with suppress(OSError):
        for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208
            with suppress(OSError, ValueError, StopIteration):  # closed since: the listing's own
                status = os.stat(f"/proc/self/fd/{entry}")  # noqa: PTH116
                if stat.S_ISREG(status.st_mode) and status.st_nlink and _is_written(entry):
                    yield identity(status)


def _is_written(descriptor: str) -> bool:
    with open(f"/proc/self/fdinfo/{descriptor}") as file:
        flags = next(line for line in file if line.startswith("flags:"))
    return int(flags.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
