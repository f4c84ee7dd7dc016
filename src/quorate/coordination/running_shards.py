"""Running shards: computed by a worker or two, held by none; in the orders needed for dealing.

Which shard is furthest behind the usual time of its worker, which shard will be done last, and when
will k shards be done? Each answer takes O(log N) on plain sorted lists and heaps.

A *timed* shard was dealt to a worker of known usual time. An *untimed* shard is measured by the
usual time of all workers. Every answer changes the latter, but not the order of untimed shards by
start: so untimed shards have a list of their own. A *late* shard has taken ``patience`` times the
usual time; nobody can tell when a late shard will be done. A *single* shard has one worker, a shard
of a *pair* two.

Legend: N workers, w worker, t step, s shard. Times are in seconds of one monotonic clock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from heapq import merge
from itertools import islice
from math import inf
from typing import Any, NamedTuple

from quorate.coordination.workers import Assignment, Deadlines, Workers, remove


class WorkerShard(NamedTuple):
    """A worker, and a shard computed by the worker."""

    worker: int
    step: int
    shard: int


class Forecast(NamedTuple):
    """The expected times of a shard."""

    late_at: float  # when the shard, on any of its workers, becomes late
    done_at: float  # when its first worker that is not late will be done
    later: Forecast | None = None  # of a pair, from ``late_at`` on


# Entries are tuples of numbers: the garbage collector does not follow them. ``singles`` is the
# number of single shards from ``shard`` on; 0: the shard of a pair.
_ByLate = tuple[float, int, int, int, int]  # late_at, worker, step, shard, singles
# done_at, late_at, worker, step, shard, singles, later
_ByDone = tuple[float, float, int, int, int, int, Forecast | None]
_ByStart = tuple[float, int, int, int]  # since, worker, step, shard


class RunningShards:
    """The running shards. Call ``advance`` before any question.

    Args:
        workers: the workers.
        patience: a shard is late when it has taken this many times the usual time.
    """

    def __init__(self, workers: Workers, patience: float) -> None:
        self.is_in_use = False  # False: no copies are made, nobody asks, and nothing is noted
        self._workers, self._patience = workers, patience
        self._usual_shard_s = inf  # of all workers
        self._by_done: list[_ByDone] = []  # timed, not late
        # By (step, first shard): when the shards of ``_by_done`` become late.
        self._singles, self._pairs = Deadlines[tuple[int, int]](), Deadlines[tuple[int, int]]()
        self._late: list[_ByLate] = []  # timed, late
        self._untimed: list[_ByStart] = []
        self._untimed_late = 0  # number of ``_untimed``, from the first on, that are late
        # By (step, first shard): the list with an entry of the shard, and the entry.
        self._entries: dict[tuple[int, int], tuple[list[Any], Any]] = {}

    # --- changes ----------------------------------------------------------------------------------

    def add(self, assignment: Assignment, shards: range) -> None:
        """Add single shards: a whole assignment, or a shard of an assignment."""
        if not self.is_in_use:
            return
        worker, step, since = assignment.worker, assignment.step, assignment.since
        if assignment.usual_shard_s is None:
            self._insert(self._untimed, (since, worker, step, shards.start), step, shards.start)
            return
        usual_shard_s = assignment.usual_shard_s * assignment.count
        forecast = Forecast(since + self._patience * usual_shard_s, since + usual_shard_s)
        self.add_timed(forecast, worker, step, shards.start, len(shards))

    def drop(self, step: int, shard: int) -> None:
        """Remove a shard, or the run from the shard on, if present."""
        if (place := self._entries.pop((step, shard), None)) is not None:
            remove(*place)
            self._singles.drop((step, shard))
            self._pairs.drop((step, shard))

    def add_timed(
        self, forecast: Forecast, worker: int, step: int, shard: int, singles: int = 0
    ) -> None:
        """Add single shards, or, without singles, a shard of a pair with the lower worker."""
        late_at, done_at, later = forecast
        entry = (done_at, late_at, worker, step, shard, singles, later)
        self._insert(self._by_done, entry, step, shard)
        (self._singles if singles else self._pairs).set((step, shard), late_at)

    def _insert(self, ordered: list[Any], entry: Any, step: int, shard: int) -> None:
        self._entries[step, shard] = ordered, entry
        insort(ordered, entry)

    # --- questions --------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Note the time."""
        for deadlines in (self._singles, self._pairs):
            while deadlines.first_at <= now:
                entry = self._entries[deadlines.pop()][1]
                _, late_at, worker, step, shard, singles, later = entry
                self.drop(step, shard)
                if later is None:
                    self._insert(self._late, (late_at, worker, step, shard, singles), step, shard)
                else:
                    self.add_timed(later, worker, step, shard, singles)
        self._untimed_late = 0
        if self._untimed:
            self._usual_shard_s = self._workers.usual_shard_s_of_all
            if self._forecast(self._untimed[0])[1] <= now:
                self._untimed_late = bisect_right(
                    self._untimed, now, key=lambda entry: self._forecast(entry)[1]
                )

    @property
    def on_time(self) -> int:
        """The number of shards on time."""
        return len(self._by_done) + len(self._untimed) - self._untimed_late

    def may_help(self, done_at: float) -> bool:
        """Return False if no shard is late and all will be done by ``done_at``; O(1)."""
        if self._late or (self._by_done and self._by_done[-1][0] > done_at):
            return True
        if not self._untimed:
            return False
        return self._untimed_late > 0 or self._untimed[-1][0] + self._usual_shard_s > done_at

    def done_at(self, count: int) -> float:
        """Return when ``count`` shards will be done; infinite if so many are not on time."""
        return next(self._last_of_first(count))[0] if count <= self.on_time else inf

    def late(self, most: int | None = None) -> Iterator[WorkerShard]:
        """Yield the late single shards, the furthest behind first.

        Args:
            most: the number of late shards, pairs included, to look at. None: all.
        """
        untimed = (
            (self._forecast(entry)[1], *entry[1:], 1)
            for entry in islice(self._untimed, self._untimed_late)
        )
        for _, worker, step, first, singles in islice(merge(self._late, untimed), most):
            for shard in range(first, first + singles):
                yield WorkerShard(worker, step, shard)

    def last_to_finish(self, most: int | None = None) -> Iterator[tuple[float, WorkerShard]]:
        """Yield single shards on time with their times of completion, the last first.

        Args:
            most: the number of shards, the first to be done, to look at, pairs included. None: all.
        """
        count = self.on_time if most is None else min(most, self.on_time)
        for done_at, _, worker, step, first, singles, _ in self._last_of_first(count):
            for shard in reversed(range(first, first + singles)):
                yield done_at, WorkerShard(worker, step, shard)

    def next_late_at(self) -> float:
        """Return when the next single shard becomes late, or infinity."""
        timed_at = self._singles.first_at
        if self._untimed_late == len(self._untimed):
            return timed_at
        return min(timed_at, self._forecast(self._untimed[self._untimed_late])[1])

    def _forecast(self, entry: _ByStart) -> _ByDone:
        since, worker, step, shard = entry
        late_at = since + self._patience * self._usual_shard_s
        return since + self._usual_shard_s, late_at, worker, step, shard, 1, None

    def _last_of_first(self, count: int) -> Iterator[_ByDone]:
        """Yield the first ``count`` shards to be done, in reverse order."""
        timed, untimed, late = self._by_done, self._untimed, self._untimed_late
        # The number of timed shards among them: the first for which no untimed one comes before.
        least, most = max(0, count - (len(untimed) - late)), min(count, len(timed))
        of_timed = bisect_left(
            range(most),
            True,
            least,
            key=lambda n: timed[n] >= self._forecast(untimed[late + count - n - 1]),
        )
        end = late + count - of_timed
        return merge(
            islice(reversed(timed), len(timed) - of_timed, None),
            (self._forecast(untimed[place]) for place in range(end - 1, late - 1, -1)),
            reverse=True,
        )
