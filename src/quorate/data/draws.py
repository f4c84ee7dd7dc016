"""What augmentation draws: random numbers for the rows of a batch, each row's its own.

Number n of a row is a pure function of (seed, epoch, row, n): a counter, hashed. So it does not
matter in which batch, shard or process a row is, in which order rows are loaded, or who else is in
its batch. Counter-based generators: Salmon, Moraes, Dror & Shaw, SC 2011; the hash is that of
SplitMix64 (``quorate.coordination.keys``).

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
from quorate.settings import whole

MOST = 1 << 32  # of what ``integers`` chooses from

Augment = Callable[[Any, "Draws"], Any]


class Draws:
    """The random numbers of one batch of rows, in one epoch.

    Each call gives the next ones: they depend on how many were drawn before, and not on what kind
    those were. All that is drawn is on the CPU.

    Args:
        seed: of the run.
        epoch: from 0.
        rows: (B,) integers, the rows' numbers in the dataset.
        repeats: (B,) integers, how often each was in the epoch before: numbers are others each
            time. None: never.

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
        """Draw real numbers: (B, n) float32, evenly from [low, high), of 2**24 values.

        Raises:
            SettingError: ``high`` is below ``low``, or n is no whole number above 0.
        """
        if not low <= high:
            raise SettingError("high", high, f"at least low={low}", "exchange them")
        unit = (self._next(n) >> np.uint64(40)) * 2.0**-24
        values = (low + (high - low) * unit).astype(np.float32)
        # Rounding may go up to the bound, which is not to be reached.
        below = np.nextafter(np.float32(high), np.float32(low))
        return torch.from_numpy(np.minimum(values, below))

    def integers(self, high: int, n: int = 1) -> torch.Tensor:
        """Draw whole numbers: (B, n) int64, evenly from 0 to high - 1.

        By multiplication and shift (Lemire, TOMACS 2019): no value is more likely than another by
        more than high / 2**32 of it.

        Raises:
            SettingError: ``high`` is below 1 or above 2**32, or n no whole number above 0.
        """
        if (high := whole("high", high, least=1)) > MOST:
            raise SettingError("high", high, f"at most {MOST:,}", "draw two numbers")
        values = (self._next(n) >> np.uint64(32)) * np.uint64(high) >> np.uint64(32)
        return torch.from_numpy(values.astype(np.int64))

    def coins(self, p: float = 0.5, n: int = 1) -> torch.Tensor:
        """Draw coins: (B, n) bool, each true with probability p.

        Raises:
            SettingError: p is no probability, or n no whole number above 0.
        """
        if not 0 <= p <= 1:
            raise SettingError("p", p, "a probability, from 0 to 1", "choose one")
        return torch.from_numpy((self._next(n) >> np.uint64(11)) * 2.0**-53 < p)

    def _next(self, n: int) -> NDArray[np.uint64]:
        """Return the next n hashes of each row, (B, n)."""
        end = self._drawn + whole("n", n, least=1)
        numbers = np.arange(self._drawn, end, dtype=np.uint64)
        self._drawn = end
        return hashes(self._keys[:, None], numbers)
