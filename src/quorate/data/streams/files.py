"""Rows of several files that have an index: map-style, any row by its number."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from quorate.data.streams.index_file import Indexed
from quorate.errors import DataError

Paths = str | Path | Sequence[str | Path]


def paths_of(given: Paths) -> list[Path]:
    """Return one path or several as a list."""
    return [Path(path) for path in ([given] if isinstance(given, (str, Path)) else given)]


class IndexedFiles(Dataset[Any]):
    """The rows of one or several files, in their order.

    No file is kept open, and nothing is shared: any thread may read at any time, and a copy in
    another process too.

    Args:
        files: in the order of their rows.
        counts: how many rows each has.

    Raises:
        DataError: there is no row in any of them.
    """

    def __init__(self, files: Sequence[Indexed], counts: Sequence[int]) -> None:
        self._files = files
        # Of each file, the number of its first row in the whole; at the end, how many there are.
        self.starts: NDArray[np.int64] = np.cumsum([0, *counts], dtype=np.int64)
        if not len(self):
            where = ", ".join(str(file.path) for file in files) or "files"
            raise DataError(where, got="no row", expected="at least one")

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, row: int) -> Any:
        """Return the sample of a row.

        Raises:
            IndexError: there is no such row.
            DataError: it is damaged, or the file was changed.
        """
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row:,} of {len(self):,}")
        return self.__getitems__([row % len(self)])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[Any]:
        """Return the samples of several rows. Opens each file once; raises as ``[row]`` does."""
        if not rows:
            return []
        if min(rows) < 0 or max(rows) >= len(self):
            raise IndexError(f"rows {min(rows):,} to {max(rows):,} of {len(self):,}")
        files = np.searchsorted(self.starts, rows, side="right") - 1
        samples: list[Any] = [None] * len(rows)
        for number in np.unique(files).tolist():
            file, first = self._files[number], int(self.starts[number])
            fd = file.open()
            try:
                for position in np.flatnonzero(files == number).tolist():
                    samples[position] = self._sample(file, fd, int(rows[position]) - first)
            finally:
                os.close(fd)
        return samples

    @abstractmethod
    def _sample(self, file: Indexed, fd: int, row: int) -> Any:
        """Return the sample of a row of a file, which is open."""
