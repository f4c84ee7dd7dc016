"""The time that all measurements may take, and the share of each."""

from __future__ import annotations

import time

LEAST_S = 20.0  # less is not worth to start a process
MOST_SHARES = 3.0  # most measurements take less than their share


class Budget:
    """Deals out time by weight. What a measurement leaves over goes to those after it.

    Args:
        minutes: for all.
        weights: of the measurements, in their order.
    """

    def __init__(self, minutes: float, weights: list[float]) -> None:
        self._until = time.monotonic() + 60 * minutes
        self._weights = weights

    def next_share(self) -> float | None:
        """Return the seconds that the next measurement may take; None: too few are left."""
        left_s = self._until - time.monotonic()
        weight, others = self._weights[0], sum(self._weights[1:])
        self._weights = self._weights[1:]
        if left_s < LEAST_S:
            return None
        return min(left_s, max(LEAST_S, MOST_SHARES * left_s * weight / (weight + others)))
