"""Unassigned shards of a step, computed and held by no worker, as runs of consecutive shards.

The first shard of a home and the longest run are found in O(log V).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from math import inf

from quorate.coordination.workers import remove


class UnassignedShards:
    """A set of shards, kept as runs of consecutive shards.

    Args:
        shards: V; the set begins with all of them.
    """

    def __init__(self, shards: int) -> None:
        self._size = shards
        self._runs = [(0, shards)] if shards else []  # (start, stop), sorted
        # (-length, start) of all runs, sorted. None: nobody asked for the longest run yet.
        self._by_length: list[tuple[int, int]] | None = None

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        for start, stop in self._runs:
            yield from range(start, stop)

    def __contains__(self, shard: int) -> bool:
        place = bisect_right(self._runs, (shard, inf))
        return place > 0 and shard < self._runs[place - 1][1]

    def first_in(self, shards: range) -> range | None:
        """Return the first run inside a range of shards, or None."""
        place = bisect_right(self._runs, (shards.start, inf))
        for start, stop in self._runs[max(0, place - 1) : place + 1]:
            if run := range(max(start, shards.start), min(stop, shards.stop)):
                return run
        return None

    def longest(self) -> range:
        """Return the longest run, the first of equally long runs; the set must not be empty."""
        if self._by_length is None:
            self._by_length = sorted((start - stop, start) for start, stop in self._runs)
        minus_length, start = self._by_length[0]
        return range(start, start - minus_length)

    def take(self, shards: range) -> None:
        """Remove a run of shards, all of which must be in the set."""
        place = bisect_right(self._runs, (shards.start, inf)) - 1
        start, stop = self._runs[place]
        assert start <= shards.start < shards.stop <= stop
        before, after = (start, shards.start), (shards.stop, stop)
        rest = ([before] if start < shards.start else []) + ([after] if shards.stop < stop else [])
        self._replace(place, place + 1, rest)
        self._size -= len(shards)

    def add(self, shards: Iterable[int]) -> None:
        """Add shards; shards in the set remain."""
        for shard in shards:
            if shard in self:
                continue
            first = end = bisect_right(self._runs, (shard, inf))
            start, stop = shard, shard + 1
            if first > 0 and self._runs[first - 1][1] == shard:
                first -= 1
                start = self._runs[first][0]
            if end < len(self._runs) and self._runs[end][0] == stop:
                stop = self._runs[end][1]
                end += 1
            self._replace(first, end, [(start, stop)])
            self._size += 1

    def _replace(self, first: int, end: int, runs: list[tuple[int, int]]) -> None:
        """Replace the runs from the position ``first`` to before ``end``."""
        if self._by_length is not None:
            for start, stop in self._runs[first:end]:
                remove(self._by_length, (start - stop, start))
            for start, stop in runs:
                insort(self._by_length, (start - stop, start))
        self._runs[first:end] = runs
