"""A queue of events to come, by virtual time; at one time, in the order they were posted."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from quorate.coordination.protocol import Applied, Event


@dataclass(order=True)
class _Due:
    """An event to come, which is void once ``still`` says no: its sender has left."""

    at: float  # virtual seconds
    order: tuple[int, int]
    event: Event = field(compare=False)
    still: Callable[[], bool] = field(compare=False)


class EventQueue:
    """Events to come. Those that are void by then are never seen."""

    def __init__(self) -> None:
        self._heap: list[_Due] = []
        self._count = itertools.count()

    def post(self, at: float, event: Event, still: Callable[[], bool]) -> None:
        """Let an event happen at a time, if it still may then."""
        # An update that takes no time ends before anything else happens at that time.
        rank = 0 if isinstance(event, Applied) else 1
        heapq.heappush(self._heap, _Due(at, (rank, next(self._count)), event, still))

    @property
    def next_at(self) -> float | None:
        """When the next event happens, if one does."""
        while self._heap and not self._heap[0].still():
            heapq.heappop(self._heap)
        return self._heap[0].at if self._heap else None

    def take(self) -> Event:
        """Return the next event. There has to be one, by ``next_at``."""
        return heapq.heappop(self._heap).event
