"""Batches of rows of like length: less padding, and the plan still deals each row once an epoch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


class ByLength:
    """The ``order`` of a Trainer: from an epoch's shuffled rows to batches of like length.

    The shuffled rows are cut into windows of so many batches. Within a window they are sorted by
    length and cut into batches; then the batches of the window come in the shuffled order of their
    first rows, and so do the rows of a batch, so that its shards take equally long. It draws
    nothing: all chance is in the order that it is given.

    Args:
        lengths: of the rows of the dataset, (R,).
        batch_size: rows of a batch. What is left at the end of an epoch is not sorted.
        window: batches.
    """

    def __init__(self, lengths: NDArray[np.int64], batch_size: int, window: int = 40) -> None:
        self._lengths = lengths
        self._batch_size = batch_size
        self._window = window

    def __call__(self, rows: Rows) -> Rows:
        """The order, (R,), of rows (R,)."""
        whole = len(rows) - len(rows) % self._batch_size
        found = []
        for start in range(0, whole, self._window * self._batch_size):
            window = rows[start : min(start + self._window * self._batch_size, whole)]
            places = np.argsort(self._lengths[window], kind="stable").reshape(-1, self._batch_size)
            places.sort(axis=1)
            places = places[np.argsort(places[:, 0])]
            found.append(window[places].reshape(-1))
        return np.concatenate([*found, rows[whole:]])
