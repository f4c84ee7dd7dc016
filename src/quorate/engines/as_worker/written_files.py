"""Files that the script's own process is writing, and a worker opens for writing too.

A worker runs the script up to its training loop. A log that the script opens with "w" is emptied
by that, under the hands of the process that writes it. Nothing of it can be undone when it is seen:
Python tells of an open file right before it is opened (an audit hook), and the only way to prevent
it would be an exception in a script that may be content with what happens. So it is said.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from contextlib import suppress

from quorate.engines.as_worker.own_process import Identity, identity
from quorate.engines.as_worker.users_line import line_of_caller

_looks = False  # a hook cannot be taken away
_files: Collection[Identity] = ()
_found: list[str] = []


def look_out(files: Collection[Identity]) -> None:
    """From now on, note which of these files are opened for writing."""
    global _looks, _files
    if files:
        _looks, _files = True, files
        sys.addaudithook(_hear)


def found() -> list[str]:
    """Return what was noted, a line each, and look no more: the script's part is over."""
    global _looks
    _looks = False
    lines = list(dict.fromkeys(_found))
    _found.clear()
    return lines


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    """Hear of an event, of which there are many, and of most before they happen."""
    if not _looks or event != "open":
        return
    path, _, flags = arguments
    if not isinstance(flags, int) or flags & os.O_ACCMODE == os.O_RDONLY:
        return
    if not isinstance(path, str | bytes | os.PathLike):
        return  # a descriptor
    with suppress(OSError, ValueError):  # there is none yet
        if identity(os.stat(path)) in _files:  # noqa: PTH116
            what = "empties" if flags & os.O_TRUNC else "writes to"
            line = line_of_caller(sys._getframe(1))
            _found.append(
                f"{os.fsdecode(path)}: each worker process {what} the file ({line}) while the main "
                "process has the file open for writing; open it only where quorate.is_worker() is "
                "False"
            )
