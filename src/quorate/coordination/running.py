"""Running: the shards that are being computed and that nobody holds, in the orders that are asked.

Which is furthest behind its worker's usual time, which will be done last, and when the k-th of them
will be in: each in O(log N).

How long a worker takes is known when it is given a shard, or it is measured by what all others
usually take, and that changes with every answer. So the latter, alone with their shard, are kept by
when they began: in any of the orders they follow each other as they began.

Legend: N workers, w worker, t step, s shard. Times are in seconds of one monotonic clock.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

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


@dataclass(eq=False, slots=True)
class _Known:
    """Shards of which it is known how long they will take, if they take as long as usual.

    One, or a run of which nobody else has any.
    """

    who: Who  # of the first
    expected: Expected
    shards: range
    then: Sequence[Expected] = ()  # once it is far behind on one worker
    is_single: bool = True
    is_behind: bool = False

    @property
    def by_done(self) -> tuple[float, float, Who]:
        return self.expected.done_at, self.expected.behind_at, self.who


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
        # Sorted. Those that are known, and not far behind:
        self._by_done: list[tuple[float, float, Who]] = []
        self._by_behind: list[tuple[float, Who]] = []
        # Those that are, and those of which it is not known how long they usually take.
        self._are_behind: list[tuple[float, Who]] = []
        self._by_since: list[tuple[float, Who]] = []
        self._usual_s = inf  # of all

    # --- what becomes of them ---------------------------------------------------------------------

    def put(self, worker: int, task: Task, shards: range) -> None:
        """Note that one worker alone computes shards: all of its task, or one of them."""
        who = Who(worker, task.step, shards.start)
        if task.usual_s is None:
            self._since[who[1:]] = entry = task.since, who
            insort(self._by_since, entry)
            return
        usual_s = task.usual_s * task.count
        behind_at = task.since + self._patience * usual_s
        self._put(_Known(who, Expected(behind_at, task.since + usual_s), shards))

    def put_two(self, worker: int, step: int, shard: int, expected: Sequence[Expected]) -> None:
        """Note that two workers compute a shard, the lower of which is named.

        Args:
            expected: what is until the first is far behind, and then; as it was when the second
                began.
        """
        who, (first, *then) = Who(worker, step, shard), expected
        self._put(_Known(who, first, range(shard, shard + 1), then, is_single=False))

    def drop(self, step: int, shard: int) -> None:
        """Forget a shard, or the run that begins with it, if it is here."""
        if not self.is_asked:
            return
        key = step, shard
        if (since := self._since.pop(key, None)) is not None:
            del self._by_since[bisect_left(self._by_since, since)]
        elif (known := self._known.pop(key, None)) is not None:
            entry = known.expected.behind_at, known.who
            if known.is_behind:
                del self._are_behind[bisect_left(self._are_behind, entry)]
            else:
                del self._by_behind[bisect_left(self._by_behind, entry)]
                del self._by_done[bisect_left(self._by_done, known.by_done)]

    def _put(self, known: _Known) -> None:
        self._known[known.who[1:]] = known
        insort(self._by_behind, (known.expected.behind_at, known.who))
        insort(self._by_done, known.by_done)

    # --- what is asked ----------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Note what time it is."""
        self._usual_s = self._members.usual_s_of_all
        while self._by_behind and self._by_behind[0][0] <= now:
            entry = self._by_behind.pop(0)
            known = self._known[entry[1][1:]]
            del self._by_done[bisect_left(self._by_done, known.by_done)]
            if known.then:
                known.expected, *known.then = known.then
                self._put(known)
            else:
                known.is_behind = True
                insort(self._are_behind, entry)

    def may_help(self, now: float, done_s: float) -> bool:
        """Return False if no shard is far behind, and all will be in by ``done_s``: quickly."""
        if self._are_behind or (self._by_done and self._by_done[-1][0] > done_s):
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
        if place >= len(self._by_done) + len(others):
            return inf
        return self._placed(place, others)[0]

    def not_behind(self, now: float) -> int:
        """Return how many are not far behind."""
        return len(self._by_done) + len(self._since_not_behind(now))

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
        a, b = len(self._by_done), len(others)
        if most is not None and most < a + b:
            a, b = self._split(most, others)
        while a or b:
            timed = self._by_done[a - 1] if a else None
            other = self._by_done_of(others[b - 1]) if b else None
            if other is None or (timed is not None and timed > other):
                assert timed is not None
                a, (done_at, _, who) = a - 1, timed
            else:
                b, (done_at, _, who) = b - 1, other
            for single in reversed([*self._singles(who)]):
                yield done_at, single

    def next_behind_at(self, now: float) -> float:
        """Return when the next shard of a single worker falls far behind; infinite: none will."""
        known = (at for at, who in self._by_behind if self._known[who[1:]].is_single)
        others = self._since_not_behind(now)
        first = self._behind_at(others[0][0]) if others else inf
        return min(next(known, inf), first)

    # --- those that are known by when they began --------------------------------------------------

    def _behind_at(self, since: float) -> float:
        return since + self._patience * self._usual_s

    def _by_done_of(self, entry: tuple[float, Who]) -> tuple[float, float, Who]:
        since, who = entry
        return since + self._usual_s, self._behind_at(since), who

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
        return (who,) if len(known.shards) == 1 else [who._replace(shard=s) for s in known.shards]

    # --- the k-th of two sorted lists -------------------------------------------------------------

    def _split(self, first: int, others: _Rest) -> tuple[int, int]:
        """Return how many of the first to be done are known, and how many are not."""
        low, high = max(0, first - len(others)), min(first, len(self._by_done))
        while low < high:  # how many of ``_by_done`` are before the others' next one
            a = (low + high) // 2
            if self._by_done[a] < self._by_done_of(others[first - a - 1]):
                low = a + 1
            else:
                high = a
        return low, first - low

    def _placed(self, place: int, others: _Rest) -> tuple[float, float, Who]:
        a, b = self._split(place, others)
        found = [self._by_done[a]] if a < len(self._by_done) else []
        if b < len(others):
            found.append(self._by_done_of(others[b]))
        return min(found)


class _Rest:
    """The end of a list, without a copy."""

    def __init__(self, entries: list[tuple[float, Who]], start: int) -> None:
        self._entries, self._start = entries, start

    def __len__(self) -> int:
        return len(self._entries) - self._start

    def __getitem__(self, place: int) -> tuple[float, Who]:
        return self._entries[self._start + place]
