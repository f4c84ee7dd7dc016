"""The pace of a run: rows per second, and the time that is left."""

from __future__ import annotations

from collections import deque


class Pace:
    """The pace over the last updates, without the time that a caller spent on reports."""

    LAST = 50

    def __init__(self) -> None:
        self._last: deque[tuple[float, int]] = deque()  # (seconds, rows)
        self._seconds, self._rows = 0.0, 0  # of all that are in it

    def add(self, seconds: float, rows: int) -> None:
        """Take an update in."""
        self._last.append((seconds, rows))
        self._seconds += seconds
        self._rows += rows
        if len(self._last) > self.LAST:
            old_s, old_rows = self._last.popleft()
            self._seconds -= old_s
            self._rows -= old_rows

    def forget(self) -> None:
        """Begin anew: what was so far is no guide."""
        self._last.clear()
        self._seconds, self._rows = 0.0, 0

    @property
    def examples_per_s(self) -> float:
        """Rows per second."""
        return self._rows / self._seconds

    def eta_s(self, updates: int) -> float:
        """Return the seconds that so many updates take."""
        return updates * self._seconds / len(self._last)
