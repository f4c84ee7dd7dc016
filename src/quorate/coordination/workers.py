"""Workers of a run: their ranks, their assignments, and the usual time of a shard on each of them.

Orders are plain sorted lists: workers by rank, idle workers, usual times. Finding an entry takes
O(log N). An insertion moves the entries behind the new entry, a few microseconds among ten
thousand. Deadlines of answers are a heap, because only the earliest is read.

Legend: N workers, w worker, t step, s shard; a version is the number of updates made when a shard
was dealt. Times are in seconds of one monotonic clock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, Generic, TypeVar

from msgspec import Struct

K = TypeVar("K", int, tuple[int, int])

RECENT = 15  # shards whose median is the usual time of a worker

_RankKey = tuple[bool, int, str, int]  # see ``Workers._rank_key``


def remove(ordered: list[Any], entry: Any) -> None:
    """Remove an entry from a sorted list."""
    del ordered[bisect_left(ordered, entry)]


def move(ordered: list[Any], before: Any, after: Any) -> None:
    """Replace an entry of a sorted list; None: no entry."""
    if before == after:
        return
    if before is not None:
        remove(ordered, before)
    if after is not None:
        insort(ordered, after)


class Deadlines(Generic[K]):
    """The deadline of each key. Only the earliest is read, so the deadlines are a heap."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, K]] = []  # also has deadlines that keys no longer have
        self._at: dict[K, float] = {}

    def set(self, key: K, at: float) -> None:
        """Add a key without a deadline."""
        self._at[key] = at
        heappush(self._heap, (at, key))
        if len(self._heap) > 2 * len(self._at) + 32:
            self._heap = [(at, key) for key, at in self._at.items()]
            heapify(self._heap)

    def drop(self, key: K) -> None:
        """Remove a key, if present."""
        self._at.pop(key, None)

    @property
    def first_at(self) -> float:
        """The earliest deadline; infinite without any key."""
        heap = self._heap
        while heap and self._at.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else inf

    def pop(self) -> K:
        """Remove and return the key of the earliest deadline. Read ``first_at`` just before."""
        key = heappop(self._heap)[1]
        del self._at[key]
        return key


class Assignment(Struct, eq=False):
    """A shard, or a run of shards, computed by a worker; later it stands for the result."""

    worker: int
    step: int
    shard: int  # the first
    version: int
    since: float
    count: int = 1
    usual_shard_s: float | None = None  # of the worker, if known at the start
    # Whether the results are known to be in no update, and counted so. The worker may have received
    # ``Cancel``.
    is_unneeded: bool = False
    shards: range = range(0)

    def __post_init__(self) -> None:
        self.shards = range(self.shard, self.shard + self.count)


@dataclass(eq=False, slots=True)
class WorkerRecord:
    """A life of a worker, from ``Joined`` to ``Left``."""

    place: str = ""  # workers of one place are neighbors; "" is the place of the coordinator
    assignment: Assignment | None = None
    is_replaced: bool = False  # the worker is being ended: it may still report, and gets no shard
    times_s: list[float] = field(default_factory=list)  # of the last ``RECENT`` shards
    # Median of ``times_s``; None before the first shard is done.
    usual_shard_s: float | None = None


class Workers:
    """The present workers.

    Args:
        timeout_s: a worker is silent for too long after this time in an assignment, and after 3
            times the usual time. None: no worker ever is.
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        self.by_number: dict[int, WorkerRecord] = {}
        self.idle: list[int] = []  # workers that can receive a shard, sorted
        # Usual times of idle workers, where known, sorted.
        self.idle_usual_shard_s: list[float] = []
        # Known usual times of all workers, sorted. None: since the last read every worker has had a
        # usual time, and the next read sorts the times anew.
        self._usual_shard_s: list[float] | None = None
        self._timeout_s = timeout_s
        self.overdue: Deadlines[int] = Deadlines()  # of busy workers: when an answer is overdue
        self._sizes: Counter[str] = Counter()  # number of workers by place
        self._by_rank: list[_RankKey] = []  # sorted
        self._ranks: dict[int, tuple[int, int]] = {}  # results of ``rank_of`` until ranks change

    def join(self, worker: int, place: str = "") -> None:
        """Add an idle worker. Ranks change."""
        self._resize(place, 1)
        self.by_number[worker] = WorkerRecord(place)
        insort(self._by_rank, self._rank_key(place, worker))
        insort(self.idle, worker)

    def leave(self, worker: int) -> Assignment | None:
        """Remove a worker, and return the worker's assignment. Ranks change."""
        record = self.by_number[worker]
        if record.assignment is None:
            self._remove_idle(worker, record)
        self.overdue.drop(worker)
        self._move_usual(record.usual_shard_s, None)
        remove(self._by_rank, self._rank_key(record.place, worker))
        del self.by_number[worker]
        self._resize(record.place, -1)
        return record.assignment

    def are_all_in(self, workers: list[int]) -> bool:
        """Return whether a list has all present workers; it may have workers long gone too."""
        return self.by_number.keys() <= set(workers)

    # --- ranks ------------------------------------------------------------------------------------

    def rank_of(self, worker: int) -> tuple[int, int]:
        """Return (rank, number of workers) of a worker."""
        if (rank_of := self._ranks.get(worker)) is None:
            key = self._rank_key(self.by_number[worker].place, worker)
            rank_of = bisect_left(self._by_rank, key), len(self.by_number)
            self._ranks[worker] = rank_of
        return rank_of

    def _rank_key(self, place: str, worker: int) -> _RankKey:
        # Large places come first, at the beginning of subtrees of a power of two: a place adds up
        # its shards of one subtree. The coordinator's place comes last, as nothing travels from it.
        return not place, -self._sizes[place] if place else 0, place, worker

    def _resize(self, place: str, by: int) -> None:
        """Change the number of workers of a place, and move the place among the ranks."""
        self._ranks.clear()
        first = bisect_left(self._by_rank, self._rank_key(place, -1))
        end = first + self._sizes[place] - (by < 0)
        self._sizes[place] += by
        if place and first < end:  # the coordinator's place is last, whatever its size
            mates = [self._rank_key(place, key[3]) for key in self._by_rank[first:end]]
            del self._by_rank[first:end]
            first = bisect_left(self._by_rank, mates[0])
            self._by_rank[first:first] = mates

    # --- assignments ------------------------------------------------------------------------------

    def assign(self, worker: int, assignment: Assignment) -> None:
        """Record the assignment of an idle worker."""
        record = self.by_number[worker]
        self._remove_idle(worker, record)
        record.assignment = assignment
        if self._timeout_s is not None:
            usual_shard_s = (record.usual_shard_s or 0.0) * assignment.count
            silent_at = assignment.since + max(self._timeout_s, 3 * usual_shard_s)
            self.overdue.set(worker, silent_at)

    def finish(self, worker: int, took_s: float | None = None) -> None:
        """Make a worker idle after an answer.

        Args:
            took_s: the time of a shard. None: the usual time of the worker is not changed.
        """
        record = self.by_number[worker]
        if took_s is not None:
            record.times_s.append(took_s)
            del record.times_s[:-RECENT]
            before_s, record.usual_shard_s = record.usual_shard_s, _median(sorted(record.times_s))
            self._move_usual(before_s, record.usual_shard_s)
        self.overdue.drop(worker)
        record.assignment = None
        if not record.is_replaced:
            insort(self.idle, worker)
            if record.usual_shard_s is not None:
                insort(self.idle_usual_shard_s, record.usual_shard_s)

    def _remove_idle(self, worker: int, record: WorkerRecord) -> None:
        if not record.is_replaced:
            remove(self.idle, worker)
            if record.usual_shard_s is not None:
                remove(self.idle_usual_shard_s, record.usual_shard_s)

    # --- times ------------------------------------------------------------------------------------

    @property
    def usual_shard_s_of_all(self) -> float:
        """The median of the workers' usual times; infinite before any is known."""
        if self._usual_shard_s is None:
            known = [record.usual_shard_s for record in self.by_number.values()]
            self._usual_shard_s = sorted(usual_s for usual_s in known if usual_s is not None)
        return _median(self._usual_shard_s) if self._usual_shard_s else inf

    def _move_usual(self, before_s: float | None, after_s: float | None) -> None:
        """Replace a usual time among those of all workers; None: no time."""
        if self._usual_shard_s is not None:
            move(self._usual_shard_s, before_s, after_s)
            # Only a worker without a usual time of its own needs the times of all workers.
            if len(self._usual_shard_s) == len(self.by_number):
                self._usual_shard_s = None

    def expected_s(self, worker: int) -> float:
        """Return how long a shard takes a worker; before its first, as long as on all workers."""
        own_s = self.by_number[worker].usual_shard_s
        return self.usual_shard_s_of_all if own_s is None else own_s

    def replace_silent(self, now: float) -> list[Assignment]:
        """Mark workers silent for too long as replaced, and return their assignments by worker."""
        silent = []
        while self.overdue.first_at <= now:
            record = self.by_number[self.overdue.pop()]
            record.is_replaced = True
            assert record.assignment is not None
            silent.append(record.assignment)
        return sorted(silent, key=lambda assignment: assignment.worker)


def _median(ordered: list[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
