"""The pace of a run: rows per second, and the time that is left."""

from __future__ import annotations

from collections import deque


class Pace:
    """The pace over the last updates, without the time that a caller spent on reports."""

    LAST = 50

    def __init__(self) -> None:
        self._last: deque[tuple[float, int]] = deque(maxlen=self.LAST)  # (seconds, rows)

    def add(self, seconds: float, rows: int) -> None:
        """Take an update in."""
        self._last.append((seconds, rows))

    def forget(self) -> None:
        """Begin anew: what was so far is no guide."""
        self._last.clear()

    @property
    def examples_per_s(self) -> float:
        """Rows per second."""
        return sum(rows for _, rows in self._last) / sum(seconds for seconds, _ in self._last)

    def eta_s(self, updates: int) -> float:
        """Return the seconds that so many updates take."""
        return updates * sum(seconds for seconds, _ in self._last) / len(self._last)
