"""Running: the shards that are being computed and that nobody holds, in the orders that are asked.

Which is furthest behind its worker's usual time, which will be done last, and when the k-th of them
will be in: each in O(log N).

How long a worker takes is known when it is given a shard, or it is measured by what all others
usually take, and that changes with every answer. So the latter, alone with their shard, are kept by
when they began: in any of the orders they follow each other as they began.

Of the former, what is asked at every event is the first to fall behind and the last to be done, and
they come and go at every event too. So they are in heaps, where one that is gone stays until it
comes up or most are gone. Only who asks for the k-th, a quorum, has them sorted.

Legend: N workers, w worker, t step, s shard. Times are in seconds of one monotonic clock.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, TypeVar

from quorate.coordination.members import Members, Task


class Who(NamedTuple):
    """Who computes which shard; of two workers the lower one."""

    worker: int
    step: int
    shard: int


class Expected(NamedTuple):
    """What is expected of a shard for some time."""

    behind_at: float  # until then: one of those that compute it is far behind from then on
    done_at: float  # by the first of those that are not


# Entries of heaps and of sorted lists are plain tuples of numbers, in which the collector of
# garbage finds nothing to follow, and so it forgets them.
_Behind = tuple[float, int, int, int]  # when it falls behind, worker, step, shard
_ByDone = tuple[float, float, int, int, int]  # when it is done, and then the same
_Entry = TypeVar("_Entry", _Behind, _ByDone)


@dataclass(eq=False, slots=True)
class _Known:
    """Shards of which it is known how long they will take, if they take as long as usual.

    One, or a run of which nobody else has any.
    """

    worker: int
    step: int
    shard: int  # the first
    count: int
    behind_at: float
    done_at: float
    then: Sequence[Expected] = ()  # once it is far behind on one worker
    is_single: bool = True
    is_behind: bool = False

    @property
    def by_behind(self) -> _Behind:
        return self.behind_at, self.worker, self.step, self.shard

    @property
    def by_done(self) -> _ByDone:
        return self.done_at, self.behind_at, self.worker, self.step, self.shard


class Running:
    """Shards that are being computed. ``advance`` before anything is asked.

    While there is one worker alone, or none of a rule's shards is computed twice, nobody asks.

    Args:
        members: the workers.
        patience: a shard is far behind when it has taken this many times the usual time.
    """

    def __init__(self, members: Members, patience: float) -> None:
        self.is_asked = False
        self._members, self._patience = members, patience
        self._known: dict[tuple[int, int], _Known] = {}  # by step and shard
        self._since: dict[tuple[int, int], tuple[float, Who]] = {}  # of the others
        # Those that are known, and not far behind: how many, heaps of them and of some that are
        # gone, the latter with minus signs, and sorted. None: nobody asked for the k-th yet.
        self._on_time = 0
        self._by_behind: list[_Behind] = []
        self._by_minus_done: list[_ByDone] = []
        self._by_done: list[_ByDone] | None = None
        # Those that are, and those of which it is not known how long they usually take; sorted.
        self._are_behind: list[tuple[float, Who]] = []
        self._by_since: list[tuple[float, Who]] = []
        self._usual_s = inf  # of all

    # --- what becomes of them ---------------------------------------------------------------------

    def put(self, task: Task, shards: range) -> None:
        """Note that one worker alone computes shards: all of its task, or one of them."""
        key = task.step, shards.start
        if task.usual_s is None:
            self._since[key] = entry = task.since, Who(task.worker, *key)
            insort(self._by_since, entry)
            return
        usual_s = task.usual_s * task.count
        behind_at, done_at = task.since + self._patience * usual_s, task.since + usual_s
        self._put(_Known(task.worker, *key, len(shards), behind_at, done_at))

    def put_two(self, worker: int, step: int, shard: int, expected: Sequence[Expected]) -> None:
        """Note that two workers compute a shard, the lower of which is named.

        Args:
            expected: what is until the first is far behind, and then; as it was when the second
                began.
        """
        first, *then = expected
        self._put(_Known(worker, step, shard, 1, *first, then, is_single=False))

    def drop(self, step: int, shard: int) -> None:
        """Forget a shard, or the run that begins with it, if it is here."""
        if not self.is_asked:
            return
        key = step, shard
        if (known := self._known.pop(key, None)) is not None:
            if known.is_behind:
                entry = known.behind_at, Who(known.worker, *key)
                del self._are_behind[bisect_left(self._are_behind, entry)]
            else:
                self._take(known)
        elif (since := self._since.pop(key, None)) is not None:
            del self._by_since[bisect_left(self._by_since, since)]

    def _put(self, known: _Known) -> None:
        self._known[known.step, known.shard] = known
        self._on_time += 1
        heapq.heappush(self._by_behind, known.by_behind)
        if self._by_done is not None:
            insort(self._by_done, known.by_done)
        else:
            heapq.heappush(self._by_minus_done, _minus(known.by_done))
        if max(len(self._by_behind), len(self._by_minus_done)) > 2 * self._on_time + 32:
            # Most are gone.
            on_time = [each for each in self._known.values() if not each.is_behind]
            self._by_behind = [each.by_behind for each in on_time]
            heapq.heapify(self._by_behind)
            if self._by_done is None:
                self._by_minus_done = [_minus(each.by_done) for each in on_time]
                heapq.heapify(self._by_minus_done)

    def _take(self, known: _Known) -> None:
        """Note that one is not among those that are not far behind any more."""
        self._on_time -= 1
        if self._by_done is not None:
            del self._by_done[bisect_left(self._by_done, known.by_done)]

    def _is_on_time(self, behind_at: float, worker: int, step: int, shard: int) -> bool:
        """Whether an entry of a heap is not of one that is gone."""
        known = self._known.get((step, shard))
        if known is None or known.is_behind:
            return False
        return known.behind_at == behind_at and known.worker == worker

    # --- what is asked ----------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Note what time it is."""
        if self._by_since:
            self._usual_s = self._members.usual_s_of_all
        while self._by_behind:
            behind_at, *who = entry = self._by_behind[0]
            is_on_time = self._is_on_time(*entry)
            if is_on_time and behind_at > now:
                break
            heapq.heappop(self._by_behind)
            if not is_on_time:
                continue
            known = self._known[who[1], who[2]]
            self._take(known)
            if known.then:
                (known.behind_at, known.done_at), *known.then = known.then
                self._put(known)
            else:
                known.is_behind = True
                insort(self._are_behind, (behind_at, Who(*who)))

    def may_help(self, now: float, done_s: float) -> bool:
        """Return False if no shard is far behind, and all will be in by ``done_s``: quickly."""
        if self._are_behind or self._last_known_done() > done_s:
            return True
        if not self._by_since:
            return False
        first, last = self._by_since[0][0], self._by_since[-1][0]
        return self._behind_at(first) <= now or last + self._usual_s > done_s

    def expected_at(self, place: int, now: float) -> float:
        """Return when so many shards, and one more, will be in; infinite: nobody can tell.

        Of those that are far behind nobody can.
        """
        others = self._since_not_behind(now)
        if place >= self._on_time + len(others):
            return inf
        known = self._sorted()
        a, b = self._split(place, known, others)
        found = [known[a]] if a < len(known) else []
        if b < len(others):
            found.append(self._by_done_of(others[b]))
        return min(found)[0]

    def not_behind(self, now: float) -> int:
        """Return how many are not far behind."""
        return self._on_time + len(self._since_not_behind(now))

    def behind(self, now: float, most: int | None = None) -> Iterator[Who]:
        """Yield the shards of single workers that are far behind, the furthest first.

        Args:
            most: look at so many, those of two workers among them. None: at all.
        """
        late = self._by_since[: len(self._by_since) - len(self._since_not_behind(now))]
        if not late and not self._are_behind:
            return
        others = ((self._behind_at(since), who) for since, who in late)
        for number, (_, who) in enumerate(heapq.merge(self._are_behind, others)):
            if number == most:
                return
            yield from self._singles(who)

    def last_to_be_done(self, now: float, most: int | None = None) -> Iterator[tuple[float, Who]]:
        """Yield when shards of single workers will be done that are not behind, the last first.

        Args:
            most: look at so many of those that are done first, those of two among them. None: all.
        """
        others = self._since_not_behind(now)
        a, b = self._on_time, len(others)
        if most is not None and most < a + b:
            a, b = self._split(most, self._sorted(), others)
        of_others = (self._by_done_of(others[place]) for place in range(b - 1, -1, -1))
        for done_at, _, *who in heapq.merge(self._known_downward(a), of_others, reverse=True):
            for single in reversed([*self._singles(Who(*who))]):
                yield done_at, single

    def next_behind_at(self, now: float) -> float:
        """Return when the next shard of a single worker falls far behind; infinite: none will."""
        known = (
            behind_at
            for behind_at, worker, step, shard in _in_order(self._by_behind)
            if self._is_on_time(behind_at, worker, step, shard)
            and self._known[step, shard].is_single
        )
        others = self._since_not_behind(now)
        first = self._behind_at(others[0][0]) if others else inf
        return min(next(known, inf), first)

    # --- those of which it is known when they are done --------------------------------------------

    def _last_known_done(self) -> float:
        """Return when the last of them will be done; minus infinity: there is none."""
        if self._by_done is not None:
            return self._by_done[-1][0] if self._by_done else -inf
        heap = self._by_minus_done
        while heap and not self._is_on_time(*_minus(heap[0])[1:]):
            heapq.heappop(heap)
        return -heap[0][0] if heap else -inf

    def _sorted(self) -> list[_ByDone]:
        """Return them in order, and keep them so from now on."""
        if self._by_done is None:
            on_time = (each for each in self._known.values() if not each.is_behind)
            self._by_done = sorted(each.by_done for each in on_time)
            self._by_minus_done = []
        return self._by_done

    def _known_downward(self, first: int) -> Iterator[_ByDone]:
        """Yield so many of those that are done first, the last of them first."""
        if self._by_done is not None:
            yield from reversed(self._by_done[:first])
            return
        for entry in map(_minus, _in_order(self._by_minus_done)):
            if self._is_on_time(*entry[1:]):
                yield entry

    # --- those that are known by when they began --------------------------------------------------

    def _behind_at(self, since: float) -> float:
        return since + self._patience * self._usual_s

    def _by_done_of(self, entry: tuple[float, Who]) -> _ByDone:
        since, who = entry
        return since + self._usual_s, self._behind_at(since), *who

    def _since_not_behind(self, now: float) -> _Rest:
        start = 0
        if self._by_since and self._behind_at(self._by_since[0][0]) <= now:
            start = bisect_right(self._by_since, now, key=lambda entry: self._behind_at(entry[0]))
        return _Rest(self._by_since, start)

    def _singles(self, who: Who) -> Iterable[Who]:
        """Return the shards of an entry, if one worker alone computes them."""
        known = self._known.get(who[1:])
        if known is None or not known.is_single:
            return () if known else (who,)
        shards = range(known.shard, known.shard + known.count)
        return (who,) if known.count == 1 else [who._replace(shard=s) for s in shards]

    # --- the k-th of two sorted lists -------------------------------------------------------------

    def _split(self, first: int, known: list[_ByDone], others: _Rest) -> tuple[int, int]:
        """Return how many of the first to be done are known, and how many are not."""
        low, high = max(0, first - len(others)), min(first, len(known))
        while low < high:  # how many of those known are before the others' next one
            a = (low + high) // 2
            if known[a] < self._by_done_of(others[first - a - 1]):
                low = a + 1
            else:
                high = a
        return low, first - low


class _Rest:
    """The end of a list, without a copy."""

    def __init__(self, entries: list[tuple[float, Who]], start: int) -> None:
        self._entries, self._start = entries, start

    def __len__(self) -> int:
        return len(self._entries) - self._start

    def __getitem__(self, place: int) -> tuple[float, Who]:
        return self._entries[self._start + place]


def _minus(entry: _ByDone) -> _ByDone:
    """Return an entry with which a heap, whose first is the least, has the greatest first."""
    done_at, behind_at, worker, step, shard = entry
    return -done_at, -behind_at, -worker, -step, -shard


def _in_order(heap: list[_Entry]) -> Iterator[_Entry]:
    """Yield the entries of a heap in order, which it leaves as it is: the k-th after O(k log k)."""
    front = [(heap[0], 0)] if heap else []
    while front:
        entry, place = heapq.heappop(front)
        yield entry
        for below in (2 * place + 1, 2 * place + 2):
            if below < len(heap):
                heapq.heappush(front, (heap[below], below))
