"""The cut of a log at a resume: removes damaged lines, and lines of steps computed again.

A log has a JSON object per line, beginning with the step. The log is read once, block by block, and
is usually truncated in place: so the file keeps its mode and its links, and a full disk does no
harm.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from quorate.machine.atomic_file import write_atomically
from quorate.machine.regular_file import open_regular

BLOCK_BYTES = 1 << 18

# A longer line is not quorate's. The bound limits the memory for a file of another program.
MOST_LINE_BYTES = 4 << 20

# Every line in the last so many bytes is parsed, which takes 0.05 s; of earlier lines only the form
# is checked. Kills and full disks damage the end of a file.
PARSED_BYTES = 1 << 20

# Only the last so many bytes are checked: some three million steps, which takes a second or two.
MOST_BYTES = 1 << 30

START = b'{"global_step": '
MOST_DIGITS = 15  # of a step, so that a step is less than 2^63
HEAD_BYTES = len(START) + MOST_DIGITS + 1


class _Lines(NamedTuple):
    """Successive lines of a log with a common fate."""

    begin: int  # bytes from the start of the file
    data: bytes
    fate: str  # KEPT, LATER or DAMAGED


KEPT, LATER, DAMAGED = "kept", "later", "damaged"


class Cut(NamedTuple):
    """The outcome of cutting a log."""

    damaged: int = 0  # number of lines removed
    kept_in: Path | None = None  # file with the damaged lines; None: the lines could not be saved
    is_a_log: bool = True  # False: the file was left unchanged
    ends_in_a_line: bool = False  # whether the last line is complete except for its line end


def cut(path: Path, global_step: int) -> Cut:
    """Remove damaged lines and lines of later steps from a log. In constant memory.

    Args:
        path: the path of a regular file. A partial line at its end is removed too.
        global_step: the last step to keep.

    Raises:
        OSError: the file cannot be read or written. If the disk has no room for removing lines from
            the middle, the file is unchanged.
    """
    # 1. Find the first line to remove, and whether any later line has to stay.
    with open_regular(path) as file:
        first, is_mixed, damaged, last = None, False, 0, b"\n"
        for lines in _read(file, global_step):
            if lines is None:
                return Cut(is_a_log=False)
            if lines.fate != KEPT:
                first = lines.begin if first is None else first
                damaged += lines.fate == DAMAGED
            else:
                is_mixed = is_mixed or first is not None
                last = lines.data
    ends_in_a_line = not last.endswith(b"\n")
    if first is None:
        return Cut(ends_in_a_line=ends_in_a_line)
    # 2. Save the damaged lines in a file beside the log: the user may still read them.
    beside = path.with_name(f"{path.name}.damaged")
    is_kept = damaged > 0 and _put_beside(path, beside, first, global_step)
    # 3. Cut the log.
    if is_mixed:
        real = path.resolve()
        write_atomically(real, _kept(real, first, global_step), like=real.stat())
    else:
        os.truncate(path, first)
    return Cut(damaged, beside if is_kept else None, ends_in_a_line=ends_in_a_line)


def _read(file: IO[bytes], global_step: int, begin: int = 0) -> Iterator[_Lines | None]:
    """Yield all lines from a byte on: in blocks if all lines of a block stay, else one by one.

    Yields None, and nothing more, if the file is not a log: a line is too long.
    """
    size = os.fstat(file.fileno()).st_size
    begin = max(begin, size - MOST_BYTES)
    file.seek(begin)
    if begin > 0 and begin == size - MOST_BYTES:
        begin += len(file.readline(MOST_LINE_BYTES))
    parsed_from = size - PARSED_BYTES
    rest = b""
    while block := file.read(min(BLOCK_BYTES, size - file.tell())):
        block = rest + block
        end = block.rfind(b"\n") + 1
        whole, rest = block[:end], block[end:]
        if begin < parsed_from and _is_kept(whole, global_step):
            yield _Lines(begin, whole, KEPT)
            begin += len(whole)
        else:
            for line in whole.splitlines(keepends=True):
                yield _Lines(begin, line, _fate(line, global_step))
                begin += len(line)
        if len(rest) > MOST_LINE_BYTES:
            yield None
            return
    if rest:  # torn by a kill: the step is computed again, or came after the checkpoint
        fate = _fate(rest, global_step)
        yield _Lines(begin, rest, LATER if fate == DAMAGED else fate)


def _is_kept(lines: bytes, global_step: int) -> bool:
    """Return whether all lines have a log's form and none is of a later step. 0.3 s per 10^6 lines.

    L lines; each line begins with ``START``, digits and a comma, and ends with ``}`` and a line
    end.
    """
    data = np.frombuffer(lines, np.uint8)
    ends = np.flatnonzero(data == ord("\n"))  # (L,) int64
    begins = np.concatenate([[0], ends[:-1] + 1])
    if not (lines.endswith(b"\n") and lines.isascii() and (ends - begins).min() > HEAD_BYTES):
        return False
    head = data[begins[:, None] + np.arange(HEAD_BYTES)]  # (L, HEAD_BYTES)
    digits = head[:, len(START) :].astype(np.int64) - ord("0")
    is_digit = np.logical_and.accumulate((digits >= 0) & (digits <= 9), axis=1)
    count = is_digit.sum(axis=1)  # (L,)
    after = head[np.arange(len(ends)), np.minimum(len(START) + count, HEAD_BYTES - 1)]
    of_form = (head[:, : len(START)] == np.frombuffer(START, np.uint8)).all(axis=1)
    if not (of_form & (count > 0) & (after == ord(",")) & (data[ends - 1] == ord("}"))).all():
        return False
    powers = 10 ** np.maximum(count[:, None] - 1 - np.arange(MOST_DIGITS + 1), 0)
    steps = (digits * powers * is_digit).sum(axis=1)
    return bool(steps.max() <= global_step)


def _fate(line: bytes, global_step: int) -> str:
    try:
        step = json.loads(line.decode("ascii"))["global_step"]  # as json.dumps writes it
    except (ValueError, KeyError, TypeError, RecursionError):
        return DAMAGED
    if type(step) is not int:
        return DAMAGED
    return KEPT if step <= global_step else LATER


def _after(path: Path, first: int, global_step: int) -> Iterator[_Lines]:
    with open_regular(path) as file:
        for lines in _read(file, global_step, first):
            if lines is not None:
                yield lines


def _kept(path: Path, first: int, global_step: int) -> Iterator[bytes]:
    """Yield the parts of a log to keep."""
    with open_regular(path) as file:
        left = first
        while left and (block := file.read(min(BLOCK_BYTES, left))):
            left -= len(block)
            yield block
    for lines in _after(path, first, global_step):
        if lines.fate == KEPT:
            yield lines.data


def _put_beside(path: Path, beside: Path, first: int, global_step: int) -> bool:
    with suppress(OSError):
        how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(beside, how, 0o666), "ab") as file:
            for lines in _after(path, first, global_step):
                if lines.fate == DAMAGED:
                    file.write(lines.data)
        return True
    return False
