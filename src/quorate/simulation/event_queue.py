"""An event queue in virtual time: the next event, and a clock that jumps to its time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from math import inf
from typing import Generic, TypeVar

T = TypeVar("T")


def always() -> bool:
    """Return True: the event happens in any case."""
    return True


class EventQueue(Generic[T]):
    """Events to come, the earliest first; of several events at one time, the first posted.

    Args:
        now: virtual time at the beginning, in seconds.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now  # seconds; grows only
        self._entries: list[tuple[float, bool, int, T, Callable[[], bool]]] = []  # a heap
        self._numbers = count()

    def post(
        self, at: float, event: T, is_valid: Callable[[], bool] = always, *, is_first: bool = False
    ) -> None:
        """Let an event happen at a time.

        Args:
            at: time in seconds. An event whose time has passed happens next.
            event: the event.
            is_valid: called when the event is next; False: the event does not happen.
            is_first: whether the event comes before other events at the same time.
        """
        heapq.heappush(self._entries, (at, not is_first, next(self._numbers), event, is_valid))

    @property
    def next_at(self) -> float:
        """The time of the next event; infinite if no event is to come."""
        while self._entries and not self._entries[0][4]():
            heapq.heappop(self._entries)
        return self._entries[0][0] if self._entries else inf

    def next(self, until: float = inf) -> T | None:
        """Return the next event, and advance the clock.

        Args:
            until: if all events are later, the clock advances to ``until``, and the result is None.

        Returns:
            None also if no event is to come and ``until`` is infinite; the clock then stands.
        """
        at = self.next_at
        if at == inf or at > max(until, self.now):
            self.now = max(self.now, until) if until < inf else self.now
            return None
        self.now = max(self.now, at)
        return heapq.heappop(self._entries)[3]
