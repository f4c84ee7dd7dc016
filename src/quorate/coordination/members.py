"""Members: the workers that are there, what each computes, and how long a shard takes it.

What is asked at every event is kept in order, so that an answer takes O(log N): who is idle, how
long a shard usually takes, who will have been silent for too long. Nothing here looks at all of the
workers but ``numbers``. Where a Python list is kept sorted, an insertion moves what is behind it,
which for ten thousand entries takes a microsecond.

Legend: N workers, w worker, t step, s shard; a version is how many updates were made when a shard
was dealt. Times are in seconds of one monotonic clock.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, field
from math import inf
from typing import TypeVar

RECENT = 15  # shards that a worker's usual time is the median of

_Order = tuple[bool, int, str, int]
_Entry = TypeVar("_Entry", int, float, _Order)


@dataclass(eq=False, slots=True)
class Task:
    """A shard that a worker computes, or a run of them; it stands for the result too."""

    worker: int
    step: int
    shard: int  # the first
    version: int
    since: float
    count: int = 1
    usual_s: float | None = None  # of a shard there, as far as was known
    is_split: bool = False  # another worker has, or had, one of its shards too
    is_lost: bool = False  # in no update, and counted as such: the worker may have been told so
    earlier: Task | None = None  # that the worker holds results of, in the same step
    shards: range = field(init=False)  # all of them

    def __post_init__(self) -> None:
        self.shards = range(self.shard, self.shard + self.count)


@dataclass(eq=False, slots=True)
class Member:
    """One life of a worker, from ``Joined`` to ``Left``."""

    task: Task | None = None
    place: str = ""  # where it is: those of one place are neighbours; "" is the coordinator's own
    is_replaced: bool = False  # it is being ended: it may report still, and gets nothing more
    times_s: list[float] = field(default_factory=list)  # of the last ``RECENT`` shards
    usual_s: float | None = None  # their median; None before the first shard is done
    rank_as_of: int = -1  # at which of the changes of ranks ``rank_of`` was found
    rank_of: tuple[int, int] = (0, 1)
    home_as_of: tuple[int, int] = (-1, -1)  # of which step, and at which of those changes
    home: range = range(0)  # its home shards of that step


class Members:
    """The workers that have joined and not left, by their numbers.

    Args:
        timeout_s: a worker that computes one shard for so long, and for 3 times its usual time, is
            silent for too long. None: none ever is.
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        self.changes = 0  # of ranks
        self.idle: list[int] = []  # workers that can be given a shard, in order
        self.by_number: dict[int, Member] = {}
        self._timeout_s = timeout_s
        self._sizes: Counter[str] = Counter()  # workers by place
        self._ordered: list[_Order] = []  # all workers, by rank
        # Of all whose usual time is known, sorted. None: it has not been asked for lately. Once
        # all times are known hardly anybody asks, and so none is sorted in at each answer.
        self._usual_s: list[float] | None = None
        self._unasked = 0  # times that were sorted in since it was asked for
        self._idle_unknown = 0  # of which no usual time is known
        # Heaps of (usual time, worker), and of (-usual time, worker), of the other idle ones, and
        # of some that are not idle any more. None: nobody asked for it yet.
        self._fastest: list[tuple[float, int]] | None = None
        self._slowest: list[tuple[float, int]] | None = None
        self._silent: list[tuple[float, int, int, Task]] = []  # a heap, with tasks that are over
        self._count = 0  # of tasks given, which orders those that are due at one time

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the workers, in order."""
        return tuple(sorted(self.by_number))

    def join(self, worker: int, place: str = "") -> None:
        """Add a worker. Ranks change."""
        self._resize(place, 1)
        self.by_number[worker] = Member(place=place)
        insort(self._ordered, self._order(worker))
        insort(self.idle, worker)
        self._idle_unknown += 1

    def leave(self, worker: int) -> Task | None:
        """Remove a worker, and return what it was computing. Ranks change."""
        member = self.by_number[worker]
        self._forget_idle(worker, member)
        if member.usual_s is not None and self._usual_s is not None:
            _drop(self._usual_s, member.usual_s)
        _drop(self._ordered, self._order(worker))
        del self.by_number[worker]
        self._resize(member.place, -1)
        return member.task

    def are_among(self, workers: list[int]) -> bool:
        """Return whether there is nobody but these, some of whom may have left."""
        return self.by_number.keys() <= set(workers)

    # --- ranks ------------------------------------------------------------------------------------

    def rank_of(self, worker: int) -> tuple[int, int]:
        """Return (rank, number of workers) of a worker."""
        member = self.by_number[worker]
        if member.rank_as_of != self.changes:
            rank = bisect_left(self._ordered, self._order(worker))
            member.rank_of, member.rank_as_of = (rank, len(self.by_number)), self.changes
        return member.rank_of

    def _order(self, worker: int) -> _Order:
        # Large places come first, where subtrees of a power of two begin: what a place has of one
        # can be added there. The coordinator's own comes last: nothing travels from there.
        place = self.by_number[worker].place
        return not place, -self._sizes[place] if place else 0, place, worker

    def _resize(self, place: str, by: int) -> None:
        """Note that a place has another number of workers: all of them change their rank."""
        self.changes += 1
        size = self._sizes[place]
        self._sizes[place] += by
        if place and size:  # those of the coordinator's own come last, however many they are
            first = bisect_left(self._ordered, (False, -size, place, -1))
            end = bisect_left(self._ordered, (False, -size, place + "\0", -1), first)
            moved = [(False, -size - by, place, order[3]) for order in self._ordered[first:end]]
            del self._ordered[first:end]
            if moved:
                at = bisect_left(self._ordered, moved[0])
                self._ordered[at:at] = moved

    # --- what they compute ------------------------------------------------------------------------

    def give(self, worker: int, task: Task) -> None:
        """Note what an idle worker computes."""
        member = self.by_number[worker]
        self._forget_idle(worker, member)
        member.task = task
        if self._timeout_s is not None:
            # A slow one has 3 times its usual time.
            usual_s = (member.usual_s or 0.0) * task.count
            at, self._count = task.since + max(self._timeout_s, 3 * usual_s), self._count + 1
            heapq.heappush(self._silent, (at, self._count, worker, task))

    def end(self, worker: int) -> None:
        """Note that a worker has answered."""
        member = self.by_number[worker]
        member.task = None
        if not member.is_replaced:
            insort(self.idle, worker)
            self._note_idle(worker, member)

    def replace(self, worker: int) -> None:
        """Note that a worker is being ended, which computes something."""
        self.by_number[worker].is_replaced = True

    def _forget_idle(self, worker: int, member: Member) -> None:
        if member.task is None and not member.is_replaced:
            _drop(self.idle, worker)
            self._idle_unknown -= member.usual_s is None

    # --- how long it takes them -------------------------------------------------------------------

    def learn(self, worker: int, seconds: float) -> None:
        """Take in how long a shard took. Best before ``end``: it is noted as idle once then."""
        member = self.by_number[worker]
        member.times_s.append(seconds)
        if len(member.times_s) > RECENT:
            del member.times_s[0]
        is_idle = member.task is None and not member.is_replaced
        before_s, member.usual_s = member.usual_s, _median(sorted(member.times_s))
        if before_s is None:
            self._idle_unknown -= is_idle
        if self._usual_s is not None:
            self._sort_in(self._usual_s, before_s, member.usual_s)
        if is_idle:
            self._note_idle(worker, member)

    def _sort_in(self, ordered: list[float], before_s: float | None, usual_s: float) -> None:
        """Replace a usual time among all; or forget all, if nobody has asked for so long.

        To sort all anew costs a comparison or two more for each that was not sorted in.
        """
        self._unasked += 1
        if self._unasked > len(self.by_number):
            self._usual_s = None
            return
        if before_s is not None:
            _drop(ordered, before_s)
        insort(ordered, usual_s)

    def _note_idle(self, worker: int, member: Member) -> None:
        if member.usual_s is None:
            self._idle_unknown += 1
            return
        most = 3 * len(self.by_number) + 32
        if self._fastest is not None:
            heapq.heappush(self._fastest, (member.usual_s, worker))
            if len(self._fastest) > most:  # most of which are idle no more
                self._fastest = None
        if self._slowest is not None:
            heapq.heappush(self._slowest, (-member.usual_s, worker))
            if len(self._slowest) > most:
                self._slowest = None

    def _idle_known(self) -> list[tuple[float, int]]:
        """Return (usual time, worker) of those that are idle, where it is known."""
        known = ((self.by_number[worker].usual_s, worker) for worker in self.idle)
        return [(usual_s, worker) for usual_s, worker in known if usual_s is not None]

    def _is_idle(self, usual_s: float, worker: int) -> bool:
        """Whether a worker is idle and takes so long as a rule."""
        member = self.by_number.get(worker)
        if member is None or member.task is not None or member.is_replaced:
            return False
        return member.usual_s == usual_s

    @property
    def usual_s_of_all(self) -> float:
        """The median of the workers' usual times; infinite before one is known."""
        self._unasked = 0
        if self._usual_s is None:
            known = (member.usual_s for member in self.by_number.values())
            self._usual_s = sorted(usual_s for usual_s in known if usual_s is not None)
        return _median(self._usual_s) if self._usual_s else inf

    @property
    def usual_s_of_fastest_idle(self) -> float:
        """The least usual time of an idle worker; infinite if none is known."""
        if self._fastest is None:
            self._fastest = self._idle_known()
            heapq.heapify(self._fastest)
        while self._fastest and not self._is_idle(*self._fastest[0]):
            heapq.heappop(self._fastest)
        return self._fastest[0][0] if self._fastest else inf

    @property
    def usual_s_of_idle(self) -> list[float | None]:
        """The least and the greatest usual time of idle workers, and None if one has none yet."""
        if self._slowest is None:
            self._slowest = [(-usual_s, worker) for usual_s, worker in self._idle_known()]
            heapq.heapify(self._slowest)
        slowest = self._slowest
        while slowest and not self._is_idle(-slowest[0][0], slowest[0][1]):
            heapq.heappop(slowest)
        found: list[float | None] = [None] if self._idle_unknown else []
        if slowest:
            found += [self.usual_s_of_fastest_idle, -slowest[0][0]]
        return found

    def expected_s(self, worker: int) -> float:
        """Return how long a shard takes there: as long as elsewhere, before one is done."""
        own_s = self.by_number[worker].usual_s
        return self.usual_s_of_all if own_s is None else own_s

    @property
    def silent_at(self) -> float:
        """When the next worker will have been silent for too long; infinite: none will be."""
        while self._silent and not self._is_due(*self._silent[0][2:]):
            heapq.heappop(self._silent)
        return self._silent[0][0] if self._silent else inf

    def silent(self, now: float) -> list[tuple[int, Task]]:
        """Return the workers that have been silent for too long, in order, with their tasks."""
        due = []
        while self.silent_at <= now:
            due.append(heapq.heappop(self._silent)[2:])
        return sorted(due, key=lambda worker_and_task: worker_and_task[0])

    def _is_due(self, worker: int, task: Task) -> bool:
        """Whether a worker owes an answer; one that is being ended owes none."""
        member = self.by_number.get(worker)
        return member is not None and member.task is task and not member.is_replaced


def _median(ordered: list[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _drop(ordered: list[_Entry], entry: _Entry) -> None:
    """Remove an entry of a sorted list, which is in it."""
    del ordered[bisect_left(ordered, entry)]
