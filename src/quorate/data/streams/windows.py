"""Windows: a row order that reads from few places of few files at a time.

A full shuffle of terabytes reads from random places of a disk. With windows, each epoch takes files
in a new order, and rows in a new order within a window of a file, so consecutive rows are close
together on the disk. The order is a function of the epoch's shuffled rows, and so of (seed, epoch).

Legend: R rows of the dataset, D rows that an epoch has, F files.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quorate.errors import SettingError
from quorate.settings import integer


class Windows:
    """A disk-friendly row order for ``Loading(order=)``: file by file, shuffled within windows.

    Args:
        starts: (F + 1,) integers, the number of the first row of each file, and R at the end.
        rows: number of rows in a window. Larger windows shuffle better, but read from places
            further apart.
        files: number of files that are read in parallel. Increase ``files`` if the rows within a
            file are similar, for example of the same class.

    Raises:
        SettingError: a number is below 1.
    """

    def __init__(self, starts: ArrayLike, *, rows: int = 4096, files: int = 1) -> None:
        self._starts: NDArray[np.int64] = np.asarray(starts, dtype=np.int64)
        self._rows = integer("Windows.rows", rows, least=1)
        self.files = integer("Windows.files", files, least=1)
        content = hashlib.sha256(f"{self._rows} {self.files} ".encode())
        content.update(self._starts.astype("<i8").tobytes())
        self.sha256 = content.hexdigest()  # of everything the order depends on, except the rows

    def __call__(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of an epoch, (D,), in the order of windows. O(D log D).

        Files are ordered by their first row in ``rows``, windows by their position in the file, and
        rows within a window as in ``rows``.
        """
        files = np.searchsorted(self._starts, rows, side="right") - 1
        first = np.full(len(self._starts), len(rows), dtype=np.int64)
        np.minimum.at(first, files, np.arange(len(rows)))
        turn = np.empty(len(first), dtype=np.int64)
        turn[np.argsort(first, kind="stable")] = np.arange(len(first))
        window = (rows - self._starts[files]) // self._rows
        # Rows with equal keys keep their given order.
        return rows[np.lexsort((window, turn[files] // self.files))]


def windows(dataset: Any, *, rows: int = 4096, files: int = 1) -> Windows:
    """Return a disk-friendly order for a dataset of several files.

    Use the result as ``Loading(order=windows(train))``.

    Args:
        dataset: a ``TarDataset``, ``LinesDataset``, ``Stream`` or ``TFRecordDataset``, or another
            dataset with a ``starts`` attribute.
        rows: number of rows of a file in a window. Default: 4096.
        files: number of files that are read in parallel. Default: 1.

    Raises:
        SettingError: the dataset does not say where its files start, or a number is below 1.
    """
    starts = getattr(dataset, "starts", None)
    if starts is None:
        expected = "a dataset with starts, the number of each file's first row"
        fix = "pass a TarDataset, LinesDataset or TFRecordDataset"
        raise SettingError("windows(dataset)", type(dataset).__name__, expected, fix)
    return Windows(starts, rows=rows, files=files)
