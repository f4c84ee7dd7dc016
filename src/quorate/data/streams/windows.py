"""Windows: an order of rows in which few places of few files are read at a time.

Rows that are drawn from all over some terabytes are read from all over a disk. Here files come in
an order of each epoch's, and rows in an order of each epoch's within a window of a file: what is
read next lies near to what was read. The order is a function of an epoch's shuffled rows, and so of
(seed, epoch), like any other.

Legend: R rows of the dataset, D rows that an epoch has, F files.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quorate.errors import SettingError
from quorate.settings import whole


class Windows:
    """An order for ``Loading(order=)``: files in turn, rows shuffled in windows of them.

    Args:
        starts: (F + 1,) the number of each file's first row, and R.
        rows: how many rows of a file a window has. More of them shuffle better, and are read from
            further apart.
        files: how many files are read side by side. Turn it up where a file has rows of one kind.

    Raises:
        SettingError: a number is below 1.
    """

    def __init__(self, starts: ArrayLike, *, rows: int = 4096, files: int = 1) -> None:
        self._starts: NDArray[np.int64] = np.asarray(starts, dtype=np.int64)
        self._rows = whole("Windows.rows", rows, least=1)
        self.files = whole("Windows.files", files, least=1)
        content = hashlib.sha256(f"{self._rows} {self.files} ".encode())
        content.update(self._starts.astype("<i8").tobytes())
        self.sha256 = content.hexdigest()  # of all that the order depends on, beside the rows

    def __call__(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of an epoch, (D,), in this order. O(D log D).

        Files come as their first rows do among those that are given, windows of a file from its
        beginning on, and rows of a window as they do among those that are given.
        """
        files = np.searchsorted(self._starts, rows, side="right") - 1
        first = np.full(len(self._starts), len(rows), dtype=np.int64)
        np.minimum.at(first, files, np.arange(len(rows)))
        turn = np.empty(len(first), dtype=np.int64)
        turn[np.argsort(first, kind="stable")] = np.arange(len(first))
        window = (rows - self._starts[files]) // self._rows
        # Rows that are equal in both keep the order that they are given in.
        return rows[np.lexsort((window, turn[files] // self.files))]


def windows(dataset: Any, *, rows: int = 4096, files: int = 1) -> Windows:
    """Return an order for a dataset of several files: ``Loading(order=windows(train))``.

    Args:
        dataset: one that says where its files begin: of this package, or a ``TFRecordDataset``.
        rows: how many rows of a file a window has.
        files: how many files are read side by side.

    Raises:
        SettingError: the dataset says nothing of files, or a number is below 1.
    """
    starts = getattr(dataset, "starts", None)
    if starts is None:
        expected = "a dataset with starts, the number of each file's first row"
        fix = "pass a TarDataset, LinesDataset or TFRecordDataset"
        raise SettingError("windows(dataset)", type(dataset).__name__, expected, fix)
    return Windows(starts, rows=rows, files=files)
