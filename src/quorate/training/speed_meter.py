"""The pace of a run: rows per second, and the remaining time."""

from __future__ import annotations

from collections import deque


class SpeedMeter:
    """The pace over the last updates, without the time that a caller spent on reports."""

    LAST = 50

    def __init__(self) -> None:
        self._last: deque[tuple[float, int]] = deque()  # (seconds, rows)
        self._seconds, self._rows = 0.0, 0  # sums over ``_last``

    def add(self, seconds: float, rows: int) -> None:
        """Add an update."""
        self._last.append((seconds, rows))
        self._seconds += seconds
        self._rows += rows
        if len(self._last) > self.LAST:
            old_s, old_rows = self._last.popleft()
            self._seconds -= old_s
            self._rows -= old_rows

    def forget(self) -> None:
        """Begin anew: the updates so far are not representative."""
        self._last.clear()
        self._seconds, self._rows = 0.0, 0

    @property
    def examples_per_s(self) -> float:
        """Rows per second."""
        return self._rows / self._seconds

    def eta_s(self, updates: int) -> float:
        """Return the time of a number of updates, in seconds."""
        return updates * self._seconds / len(self._last)
