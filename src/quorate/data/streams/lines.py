"""Line files as a map-style dataset: JSONL, or any text with one row per line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from quorate.data.indexed_files import Arrays, Indexed, IndexedFiles, Kind, Paths, indexed, paths_of

_PIECE_BYTES = 1 << 22
_NEWLINE, _RETURN = 10, 13


class LinesDataset(IndexedFiles):
    """The lines of one or more files. Empty lines are skipped.

    The first use of a file reads the whole file and stores an index of the lines next to the file.

    Args:
        files: a path, or a list of paths.
        parse: a function from the bytes of a line, without the line end, to a sample:
            ``json.loads``, for example.

    Raises:
        DataError: a file is missing or compressed, or all files together have no line.
    """

    def __init__(self, files: Paths, parse: Callable[[bytes], Any]) -> None:
        self._parse = parse
        found = [indexed(path, KIND) for path in paths_of(files)]
        super().__init__(found, [len(file.arrays["starts"]) for file in found])

    def _sample(self, file: Indexed, fd: int, row: int) -> Any:
        start, size = int(file.arrays["starts"][row]), int(file.arrays["sizes"][row])
        where = f"{file.path}, row {row:,}"
        line = file.read(fd, start, size, where)
        try:
            return self._parse(line)
        except Exception as error:
            error.add_note(f"quorate: in {where}, at byte {start:,}")
            raise


def _scan(path: Path, file: BinaryIO, size: int) -> Arrays:  # noqa: ARG001
    """Find the starts of lines, and the lengths without line ends."""
    ends, returns, at = [], [], 0
    was_return = False
    while piece := file.read(_PIECE_BYTES):
        content = np.frombuffer(piece, dtype=np.uint8)
        found = np.flatnonzero(content == _NEWLINE)
        before = np.where(found > 0, content[found - 1] == _RETURN, was_return)
        ends.append(found.astype(np.int64) + at)
        returns.append(before)
        was_return = bool(content[-1] == _RETURN)
        at += len(piece)
    stops: NDArray[np.int64] = np.concatenate([*ends, np.zeros(0, np.int64)])
    is_return = np.concatenate([*returns, np.zeros(0, bool)])
    if at and (not len(stops) or stops[-1] != at - 1):  # the last line has no end
        stops, is_return = np.append(stops, at), np.append(is_return, was_return)
    starts = np.concatenate([np.zeros(min(1, len(stops)), np.int64), stops[:-1] + 1])
    sizes = stops - starts - is_return
    there = sizes > 0
    return {"starts": starts[there], "sizes": sizes[there]}


def _fits(arrays: Arrays, size: int) -> bool:
    """Return whether arrays are possible lines of a file: ordered, not empty, with ends between."""
    starts, sizes = arrays["starts"], arrays["sizes"]
    return (
        len(starts) == len(sizes)
        and bool(((starts >= 0) & (starts < size) & (sizes > 0)).all())
        # Compare differences: a sum may overflow.
        and bool((starts[1:] - starts[:-1] > sizes[:-1]).all())
        and bool((sizes <= size - starts).all())
    )


KIND = Kind("a text file", {"starts": "<i8", "sizes": "<i8"}, _scan, _fits)
