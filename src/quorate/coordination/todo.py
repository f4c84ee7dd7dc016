"""Todo: the shards of a step that nobody computes or holds, as runs of consecutive ones.

The first one of a home and the longest run are found in O(log V), however many there are.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class Todo:
    """A set of shards.

    Args:
        shards: V; all of them are in it.
    """

    def __init__(self, shards: int) -> None:
        self._starts = [0] if shards else []  # of runs, in order
        self._stops = {0: shards} if shards else {}  # by start
        self._size = shards
        # (-length, start) of all runs, and of some that are gone. None: nobody asked for it yet.
        self._longest: list[tuple[int, int]] | None = None

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        for start in self._starts:
            yield from range(start, self._stops[start])

    def __contains__(self, shard: int) -> bool:
        return self.stop_of(shard) > shard

    def stop_of(self, shard: int) -> int:
        """Return where the run ends that a shard is in; the shard itself if it is in none."""
        place = bisect_right(self._starts, shard) - 1
        return max(shard, self._stops[self._starts[place]]) if place >= 0 else shard

    def first_in(self, shards: range) -> range | None:
        """Return the first run of consecutive shards that is in it, of some that are."""
        first, end = shards.start, shards.stop
        stop = self.stop_of(first)
        if stop == first:
            place = bisect_left(self._starts, first)
            if place == len(self._starts):
                return None
            first = self._starts[place]
            stop = self._stops[first]
        return range(first, min(stop, end)) if first < end else None

    def longest(self) -> range:
        """Return the longest run, the first of several; there must be one."""
        if self._longest is None:
            self._longest = [(start - stop, start) for start, stop in self._stops.items()]
            heapq.heapify(self._longest)
        while True:
            minus_length, start = self._longest[0]
            if self._stops.get(start) == start - minus_length:
                return range(start, start - minus_length)
            heapq.heappop(self._longest)

    def take(self, shards: range) -> None:
        """Remove consecutive shards, all of which are in it."""
        place = bisect_right(self._starts, shards.start) - 1
        start = self._starts[place]
        stop = self._stops[start]
        assert start <= shards.start < shards.stop <= stop
        if start < shards.start:
            self._set(start, shards.start)
            place += 1
        else:
            del self._starts[place], self._stops[start]
        if shards.stop < stop:
            self._starts.insert(place, shards.stop)
            self._set(shards.stop, stop)
        self._size -= len(shards)

    def add(self, shards: Iterable[int]) -> None:
        """Add shards; those that are in it stay."""
        for shard in shards:
            place = bisect_right(self._starts, shard)
            before = self._starts[place - 1] if place else None
            if before is not None and self._stops[before] > shard:
                continue
            stop = shard + 1
            if place < len(self._starts) and self._starts[place] == stop:
                del self._starts[place]
                stop = self._stops.pop(stop)
            if before is not None and self._stops[before] == shard:
                self._set(before, stop)
            else:
                self._starts.insert(place, shard)
                self._set(shard, stop)
            self._size += 1

    def _set(self, start: int, stop: int) -> None:
        self._stops[start] = stop
        if self._longest is not None:
            heapq.heappush(self._longest, (start - stop, start))
