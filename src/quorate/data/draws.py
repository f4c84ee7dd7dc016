"""Random numbers for augmentation, one independent sequence per row.

Number n of a row is a pure function of (seed, epoch, row, n): a hashed counter. The numbers depend
neither on the batch, shard or process of a row, nor on the order in which rows are loaded, nor on
the other rows of the batch. Counter-based generators: Salmon, Moraes, Dror & Shaw, SC 2011; the
hash is that of SplitMix64 (``quorate.coordination.keys``).

Legend: B rows of a batch, n numbers drawn at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from quorate.coordination.keys import hashes, key
from quorate.errors import SettingError
from quorate.settings import integer

MOST = 1 << 32  # largest number of values for ``integers``

Augment = Callable[[Any, "Draws"], Any]


class Draws:
    """Random numbers for one batch of rows in one epoch. ``Loading(augment=)`` receives a Draws.

    Each call returns the next numbers of every row. The numbers depend on the count of earlier
    draws, but not on the kind of these draws. All results are on the CPU.

    Args:
        seed: seed of the run.
        epoch: number of the epoch, from 0.
        rows: (B,) integers, the indices of the rows in the dataset.
        repeats: (B,) integers, how often each row has already occurred in the epoch; a repeated row
            gets new numbers. Default: None, no row is repeated.

    Example::

        def augment(batch, draws):
            images, labels = batch
            return flip(images, draws.coins()), labels
    """

    def __init__(
        self, seed: int, epoch: int, rows: ArrayLike, repeats: ArrayLike | None = None
    ) -> None:
        self.rows = np.asarray(rows, dtype=np.int64)  # (B,)
        self._keys = hashes(key("augment", seed, epoch), self.rows.astype(np.uint64))
        if repeats is not None:
            times = np.asarray(repeats).astype(np.uint64)
            again = hashes(self._keys ^ np.uint64(key("again")), times)
            self._keys = np.where(times > 0, again, self._keys)
        self._drawn = 0

    def uniform(self, n: int = 1, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        """Draw uniform real numbers from [low, high): (B, n) float32.

        Each number is one of 2**24 equally likely values.

        Raises:
            SettingError: ``high`` is below ``low``, or n is not a whole number above 0.
        """
        if not low <= high:
            raise SettingError("high", high, f"at least low={low}", "exchange them")
        unit = (self._next(n) >> np.uint64(40)) * 2.0**-24
        values = (low + (high - low) * unit).astype(np.float32)
        # Rounding may reach the upper bound, which must be excluded.
        below = np.nextafter(np.float32(high), np.float32(low))
        return torch.from_numpy(np.minimum(values, below))

    def integers(self, high: int, n: int = 1) -> torch.Tensor:
        """Draw uniform integers from 0 to high - 1: (B, n) int64.

        By multiplication and shift (Lemire, TOMACS 2019): the probabilities of two values differ by
        a factor of at most 1 + high / 2**32.

        Raises:
            SettingError: ``high`` is below 1 or above 2**32, or n is not a whole number above 0.
        """
        if (high := integer("high", high, least=1)) > MOST:
            raise SettingError("high", high, f"at most {MOST:,}", "draw two numbers")
        values = (self._next(n) >> np.uint64(32)) * np.uint64(high) >> np.uint64(32)
        return torch.from_numpy(values.astype(np.int64))

    def coins(self, p: float = 0.5, n: int = 1) -> torch.Tensor:
        """Draw booleans that are True with probability p: (B, n) bool.

        Raises:
            SettingError: p is not a probability, or n is not a whole number above 0.
        """
        if not 0 <= p <= 1:
            raise SettingError("p", p, "a probability, from 0 to 1", "choose one")
        return torch.from_numpy((self._next(n) >> np.uint64(11)) * 2.0**-53 < p)

    def _next(self, n: int) -> NDArray[np.uint64]:
        """Return the next n hashes of each row, (B, n)."""
        end = self._drawn + integer("n", n, least=1)
        numbers = np.arange(self._drawn, end, dtype=np.uint64)
        self._drawn = end
        return hashes(self._keys[:, None], numbers)
