"""The cut of a log at a resume: removes damaged lines, and lines of steps computed again.

A log has a JSON object per line with the step. The log is read line by line, and is usually
truncated in place: so the file keeps its mode and its links, and a full disk does no harm.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from quorate.machine.atomic_file import write_atomically
from quorate.machine.regular_file import open_regular

BLOCK_BYTES = 1 << 18

# A longer line is not quorate's. The bound limits the memory for a file of another program.
MOST_LINE_BYTES = 4 << 20

# Only the last so many bytes are checked: some four million steps, which takes a few seconds.
MOST_BYTES = 1 << 30


class _Entry(msgspec.Struct):
    """The part of a line that decides about its fate."""

    global_step: int


_DECODER = msgspec.json.Decoder(_Entry)


class _LogLine(NamedTuple):
    begin: int  # bytes from the start of the file
    data: bytes
    fate: str  # KEPT, LATER or DAMAGED


KEPT, LATER, DAMAGED = "kept", "later", "damaged"


class LogCut(NamedTuple):
    """The outcome of cutting a log."""

    damaged: int = 0  # number of lines removed
    kept_in: Path | None = None  # file with the damaged lines; None: the lines could not be saved
    is_a_log: bool = True  # False: the file was left unchanged


def cut(path: Path, global_step: int) -> LogCut:
    """Remove damaged lines and lines of later steps from a log. In constant memory.

    Args:
        path: the path of a regular file. A partial line at its end is removed too.
        global_step: the last step to keep.

    Raises:
        OSError: the file cannot be read or written. If the disk has no room for removing lines from
            the middle, the file is unchanged.
    """
    # 1. Find the first line to remove, and whether any later line has to stay.
    first, is_mixed, damaged = None, False, 0
    for line in _lines(path, global_step, _first_checked(path)):
        if len(line.data) > MOST_LINE_BYTES:
            return LogCut(is_a_log=False)
        if line.fate == KEPT:
            is_mixed = is_mixed or first is not None
            continue
        first = line.begin if first is None else first
        damaged += line.fate == DAMAGED
    if first is None:
        return LogCut()
    # 2. Save the damaged lines in a file beside the log: the user may still read them.
    beside = path.with_name(f"{path.name}.damaged")
    is_kept = damaged > 0 and _put_beside(path, beside, first, global_step)
    # 3. Cut the log.
    if is_mixed:
        real = path.resolve()
        write_atomically(real, _kept(real, first, global_step), like=real.stat())
    else:
        os.truncate(path, first)
    return LogCut(damaged, beside if is_kept else None)


def _first_checked(path: Path) -> int:
    """Return the beginning of the first line to check, in bytes."""
    with open_regular(path) as file:
        begin = max(0, file.seek(0, os.SEEK_END) - MOST_BYTES)
        file.seek(begin)
        return begin + (len(file.readline(MOST_LINE_BYTES)) if begin else 0)


def _lines(path: Path, global_step: int, begin: int) -> Iterator[_LogLine]:
    """Yield the lines from a byte on; of a line longer than ``MOST_LINE_BYTES`` a beginning."""
    with open_regular(path) as file:
        file.seek(begin)
        while data := file.readline(MOST_LINE_BYTES + 1):
            fate = _fate(data, global_step)
            if fate == DAMAGED and not data.endswith(b"\n"):
                fate = LATER  # torn by a kill: the step is computed again
            yield _LogLine(begin, data, fate)
            begin += len(data)


def _fate(line: bytes, global_step: int) -> str:
    """Return the fate of a line, which is ASCII text as ``json.dumps`` writes it."""
    step: object = None
    try:
        step = _DECODER.decode(line).global_step if line.isascii() else None
    except (msgspec.DecodeError, RecursionError):  # lines of old versions may have NaN
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            step = json.loads(line.decode())["global_step"]
    if type(step) is not int:
        return DAMAGED
    return KEPT if step <= global_step else LATER


def _kept(path: Path, first: int, global_step: int) -> Iterator[bytes]:
    """Yield the parts of a log to keep."""
    with open_regular(path) as file:
        while block := file.read(min(BLOCK_BYTES, first - file.tell())):
            yield block
    for line in _lines(path, global_step, first):
        if line.fate == KEPT:
            yield line.data


def _put_beside(path: Path, beside: Path, first: int, global_step: int) -> bool:
    with suppress(OSError):
        how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(beside, how, 0o666), "ab") as file:
            for line in _lines(path, global_step, first):
                if line.fate == DAMAGED:
                    file.write(line.data)
        return True
    return False
