"""Open steps, begun and not applied; and the record of unbegun steps.

A step is open from the assignment of its first shard until its update is made. Steps begin about in
order, and need not be applied in order. So the position of a run is two things: the number of
updates, and the steps left open though later steps are applied. The state of training records both
(``training/state.py``), and a resumed run begins with the steps left open.

A shard of an open step is unassigned, computed by a worker or two, or held by a worker; a second
worker may still compute a held shard. ``OpenSteps`` records all of this: no event has to look
through all shards or workers. ``UnassignedShards`` finds the first shard of a home and the longest
run in O(log V).

Legend: V shards of a step, t step, s shard, w worker; a version is the number of updates made when
a shard was dealt.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterable
from math import inf

from msgspec import Struct

from quorate.coordination.running_shards import Forecast, RunningShards
from quorate.coordination.workers import Assignment, move, remove


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

    def __contains__(self, shard: int) -> bool:
        return self.first_in(range(shard, shard + 1)) is not None

    def _place(self, shard: int) -> int:
        """Return the place of the last run that begins at a shard or before; 0 if none does."""
        return max(0, bisect_right(self._runs, (shard, inf)) - 1)

    def first_in(self, shards: range) -> range | None:
        """Return the first run inside a range of shards, or None."""
        place = self._place(shards.start)
        for start, stop in self._runs[place : place + 2]:
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
        place = self._place(shards.start)
        start, stop = self._runs[place]
        assert start <= shards.start < shards.stop <= stop
        rest = [(start, shards.start)] if start < shards.start else []
        if shards.stop < stop:
            rest.append((shards.stop, stop))
        self._replace(place, 1, rest)
        self._size -= len(shards)

    def add(self, shards: Iterable[int]) -> None:
        """Add shards; shards in the set remain."""
        for shard in shards:
            place = self._place(shard)
            if self._runs[place : place + 1] and self._runs[place][1] < shard:
                place += 1
            touching = [run for run in self._runs[place : place + 2] if run[0] <= shard + 1]
            start = min([shard, *(start for start, _ in touching)])
            stop = max([shard + 1, *(stop for _, stop in touching)])
            if (start, stop) not in touching:
                self._replace(place, len(touching), [(start, stop)])
                self._size += 1

    def _replace(self, place: int, count: int, after: list[tuple[int, int]]) -> None:
        """Replace some runs, from a place on."""
        before = self._runs[place : place + count]
        self._runs[place : place + count] = after
        if self._by_length is not None:
            for start, stop in before:
                remove(self._by_length, (start - stop, start))
            for start, stop in after:
                insort(self._by_length, (start - stop, start))


_Age = tuple[int, int, int]  # version, order, number: the oldest step is the least


class OpenStep(Struct, eq=False):
    """A step, begun and not applied."""

    number: int
    order: int  # how many steps were begun before
    shards: int  # V
    needed: int  # number of shards that must be held before the update
    begun_at: float
    unassigned: UnassignedShards
    held: dict[int, Assignment] = {}  # by shard
    computing: dict[int, Assignment] = {}  # by shard
    copies: dict[int, Assignment] = {}  # by shard: of the second worker
    forecasts: dict[int, Forecast] = {}  # by shard with a copy
    running: set[int] = set()  # shards that are computed and not held
    failures: dict[int, list[int]] = {}  # shard -> workers it failed on
    has_runs: bool = True  # False: a worker crashed, or user code raised, in a run
    lost_with: dict[int, int] = {}  # unassigned shard -> worker that left
    age: _Age | None = None  # None: no worker has begun, or still has, a shard of the step
    ready_age: _Age | None = None  # the age, if enough shards are held for the update

    @property
    def wanting(self) -> int:
        """The number of shards still missing for the update."""
        return self.needed - len(self.held)

    @property
    def assignments(self) -> list[Assignment]:
        """The assignments of workers computing shards of the step, sorted by worker."""
        if not self.computing:  # so there are no copies either
            return []
        assignments = {*self.computing.values(), *self.copies.values()}
        return sorted(assignments, key=lambda assignment: assignment.worker)

    def failed_on(self, shard: int) -> list[int]:
        """Return the workers on whom a shard failed."""
        return self.failures.get(shard, [])

    def note_failure(self, shard: int, worker: int) -> list[int]:
        """Record a failure of a shard, and return all workers on whom the shard failed."""
        self.failures.setdefault(shard, []).append(worker)
        return self.failures[shard]


class OpenSteps:
    """The open steps in the order of their beginning, and the position of the run.

    Args:
        applied: number of updates made so far.
        left_open: steps not applied, though later steps are.
        running: receives the shards computed and not held.
        staleness: the most updates between parameters and gradient. 0: a single step is open.
    """

    def __init__(
        self, applied: int, left_open: Iterable[int], running: RunningShards, staleness: float = inf
    ) -> None:
        self.applied = applied
        self.applying: int | None = None  # the step whose update is being made
        self.by_number: dict[int, OpenStep] = {}
        self.with_unassigned: list[OpenStep] = []  # steps with an unassigned shard, oldest first
        self.running = running
        self._staleness = staleness
        self._lists_ages = 0 < staleness < inf
        self._begun = 0
        # Of all steps of which a worker has a shard, if ``_lists_ages``; sorted.
        self._by_age: list[_Age] = []
        self.ready: list[_Age] = []  # of steps with enough shards for an update, sorted
        # Unbegun steps: these, sorted, and all from ``_top`` on.
        self._skipped = sorted(left_open)
        self._top = applied + len(self._skipped)

    def step_awaiting(self, assignment: Assignment) -> OpenStep | None:
        """Return the step that awaits results of an assignment; None: all results come too late.

        The sums of a step whose update is being made are collected: no result may be added.
        """
        step = self.by_number.get(assignment.step)
        if step is None or step.number == self.applying:
            return None
        return None if all(map(step.held.__contains__, assignment.shards)) else step

    # --- who computes and holds what --------------------------------------------------------------

    def assign(self, assignment: Assignment, forecast: Forecast | None = None) -> None:
        """Record an assignment.

        Args:
            forecast: of both workers, if another worker computes the same shard.
        """
        step, shard = self.by_number[assignment.step], assignment.shard
        if forecast is not None:
            self._split(step, step.computing[shard])
            step.copies[shard], step.forecasts[shard] = assignment, forecast
            self._update_running(step, shard)
        else:
            step.unassigned.take(assignment.shards)
            if not step.unassigned:
                self.with_unassigned.remove(step)
            step.computing.update(dict.fromkeys(assignment.shards, assignment))
            step.running.update(assignment.shards)
            self.running.add(assignment, assignment.shards)
        if step.age is None:  # else another shard has an older version
            step.age = (assignment.version, step.order, step.number)
            if self._lists_ages:
                insort(self._by_age, step.age)

    def finish(self, assignment: Assignment) -> None:
        """Record the end of an assignment. The worker does not hold the results yet."""
        if (step := self.by_number.get(assignment.step)) is None:
            return
        for shard in assignment.shards:
            first, copy = step.computing.pop(shard), step.copies.pop(shard, None)
            if (other := copy if first is assignment else first) is not None:
                step.computing[shard] = other
            self._update_running(step, shard)

    def hold(self, step: OpenStep, shards: Collection[int], assignment: Assignment) -> None:
        """Record results held by the worker of an assignment, and by no worker before."""
        step.held.update(dict.fromkeys(shards, assignment))
        for shard in step.running.intersection(shards):  # another worker computes the shard too
            self._update_running(step, shard)
        if len(step.held) >= step.needed:
            self._set_age(step, step.age)

    def lose(self, worker: int) -> None:
        """Record the loss of all results held by a worker."""
        for step in self.by_number.values():
            lost = [shard for shard, held in step.held.items() if held.worker == worker]
            for shard in lost:
                del step.held[shard]
                self._update_running(step, shard)
            if lost:
                self.put_back(step.number, lost, lost_with=worker)
                if step.number == self.applying:
                    self.applying = None  # the update is not made: the sums went with the worker

    def put_back(self, number: int, shards: Iterable[int], lost_with: int | None = None) -> None:
        """Have shards of a step dealt again, unless a worker computes or holds them.

        Args:
            number: of the step, which may be applied by now.
            lost_with: the worker that left with the shards, if any.
        """
        if (step := self.by_number.get(number)) is None:
            return
        again = [s for s in shards if s not in step.held and s not in step.computing]
        if again and not step.unassigned:
            insort(self.with_unassigned, step, key=lambda each: each.order)
        step.unassigned.add(again)
        if lost_with is not None:
            step.lost_with.update(dict.fromkeys(again, lost_with))
        age = step.age
        if self._staleness:  # else all shards have one version
            assignments = (*step.held.values(), *step.computing.values(), *step.copies.values())
            version = min([assignment.version for assignment in assignments], default=None)
            age = None if version is None else (version, step.order, step.number)
        self._set_age(step, age)

    def _split(self, step: OpenStep, assignment: Assignment) -> None:
        """List the shards of a run singly: a second worker receives a copy of a shard."""
        if assignment.count > 1:
            self.running.drop(step.number, assignment.shard)
            for shard in assignment.shards:
                self._update_running(step, shard)

    def _update_running(self, step: OpenStep, shard: int) -> None:
        """Note who computes a shard now."""
        if self.running.is_in_use:
            self.running.drop(step.number, shard)
        assignment = step.computing.get(shard)
        if assignment is None or shard in step.held:
            step.running.discard(shard)
            return
        step.running.add(shard)
        copy = step.copies.get(shard)
        if copy is None:
            self.running.add(assignment, range(shard, shard + 1))
        elif step.needed < step.shards:  # else no question concerns shards that two compute
            lower = min(assignment.worker, copy.worker)
            self.running.add_timed(step.forecasts[shard], lower, step.number, shard)

    # --- the next step to be applied --------------------------------------------------------------

    def _set_age(self, step: OpenStep, age: _Age | None) -> None:
        """List a step by age, and among the ready steps."""
        ready_age = age if len(step.held) >= step.needed else None
        if self._lists_ages:
            move(self._by_age, step.age, age)
        if ready_age != step.ready_age:
            move(self.ready, step.ready_age, ready_age)
        step.age, step.ready_age = age, ready_age

    def next_to_apply(self) -> OpenStep | None:
        """Return the ready step with the oldest version, or None if an older step has no time.

        A step of version v may be applied after v + K updates at most. All open steps can be
        applied if they can in the order of their versions (earliest deadline first: Jackson, 1955).
        No more steps are open than the rule bears, so v - i >= applied - K for the i-th step, from
        0. An update costs each older step 1 of this slack, and costs the younger steps nothing, as
        they move up by 1. If the oldest ready step has to wait, all ready steps have to.

        The wait is no deadlock. A leaving worker makes its step as fresh as can be, and the oldest
        of all steps never has to wait.
        """
        if not self.ready:
            return None
        oldest = self.ready[0]
        if self._lists_ages:
            least = self.applied + 1 - int(self._staleness)
            end, place = bisect_left(self._by_age, oldest[:1]), 0  # steps before ``end`` are older
            while place < end:
                slack = self._by_age[place][0] - place - least
                if slack < 0:
                    return None
                place += slack + 1  # versions do not fall: the steps in between have time too
        return self.by_number[oldest[2]]

    # --- which steps are open ---------------------------------------------------------------------

    def next_to_begin(self, within: int, end: int, next_home: Callable[[int, int], int]) -> int:
        """Return the first unbegun step, or an unbegun home step a little later.

        Args:
            within: number of steps to look through.
            end: the first number beyond the last step.
            next_home: from two steps a and b to the first home step of [a, b), or b.
        """
        first = self._skipped[0] if self._skipped else self._top
        if within == 1:
            return first
        stop = min(first + within, end)
        step = next_home(first, stop)
        while step < stop:
            place = bisect_left(self._skipped, step)
            if step >= self._top or self._skipped[place : place + 1] == [step]:
                return step
            step = next_home(step + 1, stop)
        return first

    def begin(self, number: int, shards: int, needed: int, now: float) -> OpenStep:
        """Open an unbegun step; earlier unbegun steps count as skipped."""
        if number < self._top:
            remove(self._skipped, number)
        else:
            self._skipped += range(self._top, number)
            self._top = number + 1
        step = OpenStep(number, self._begun, shards, needed, now, UnassignedShards(shards))
        self._begun += 1
        self.with_unassigned.append(step)
        self.by_number[number] = step
        return step

    def close(self, number: int) -> None:
        """Record the update of a step."""
        step = self.by_number.pop(number)
        if step.unassigned:
            self.with_unassigned.remove(step)
        for shard in step.running:
            self.running.drop(number, shard)
        self._set_age(step, None)
        self.applied += 1
        self.applying = None

    def unbegin_untouched(self) -> None:
        """Make the open steps unbegun again of which no worker computes or holds a shard."""
        for step in [s for s in self.with_unassigned if len(s.unassigned) == s.shards]:
            self.with_unassigned.remove(step)
            del self.by_number[step.number]
            insort(self._skipped, step.number)

    def track_running_shards(self) -> None:
        """Have ``running`` note the shards computed now and later, from the first call on."""
        if not self.running.is_in_use:
            self.running.is_in_use = True
            for step in self.by_number.values():
                for assignment in step.assignments:
                    self.running.add(assignment, assignment.shards)
