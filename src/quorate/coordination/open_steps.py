"""Open steps: begun and not applied yet; and the books of which steps were never begun.

A step is open from its first shard that is dealt until its update is made. Steps are begun about in
their order and need not be applied in it. So a position in a run is not one number: it is how many
updates were made, and which steps are left open though later ones are applied. A checkpoint saves
both, and a resume begins with those that were left.

A shard of an open step is either to do, or computed by one worker or two, or held by one; while it
is held another may still compute it. These books are kept here, so that nobody has to look through
all shards or workers to know.

Legend: V shards of a step, t step, s shard, w worker; a version is how many updates were made when
a shard was dealt.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from quorate.coordination.deadlines import Deadlines
from quorate.coordination.members import Task
from quorate.coordination.running import Expected, Running
from quorate.coordination.todo import Todo


@dataclass(eq=False, slots=True)
class OpenStep:
    """A step that was begun and is not applied."""

    number: int
    order: int  # how many were begun before
    shards: int
    needed: int  # of them
    begun_at: float
    todo: Todo  # nobody computes or holds them
    kept: dict[int, Task] = field(default_factory=dict)  # by shard: of who holds it
    held: dict[int, Task] = field(default_factory=dict)  # by worker: the last of those
    computing: dict[int, Task] = field(default_factory=dict)  # by shard
    copies: dict[int, Task] = field(default_factory=dict)  # by shard that another computes too
    copied: dict[int, Sequence[Expected]] = field(default_factory=dict)  # by shard
    running: int = 0  # how many shards are being computed that nobody holds
    failures: dict[int, list[int]] = field(default_factory=dict)  # shard -> workers it failed on
    has_runs: bool = True  # False: a worker crashed, or user code raised, in one
    lost_with: dict[int, int] = field(default_factory=dict)  # shard to do -> the worker that left

    @property
    def wanting(self) -> int:
        """How many more shards must be kept before the update."""
        return self.needed - len(self.kept)

    @property
    def is_ready(self) -> bool:
        """Whether enough shards are kept."""
        return self.wanting <= 0

    @property
    def tasks(self) -> list[Task]:
        """What workers are computing of it, by their numbers."""
        tasks = {*self.computing.values(), *self.copies.values()}
        return sorted(tasks, key=lambda task: task.worker)

    @property
    def results(self) -> Mapping[Task, int]:
        """Whose results are kept, and of how many shards each."""
        if len(self.held) == 1:
            (task,) = self.held.values()
            if task.earlier is None:  # a run of all shards: nobody has to count
                return {task: len(self.kept)}
        return Counter(self.kept.values())

    @property
    def version(self) -> int | None:
        """The oldest version that a gradient of it is from, or will be; None: nobody has any."""
        tasks = (self.kept, self.computing, self.copies)
        return min((task.version for each in tasks for task in each.values()), default=None)

    def failed_on(self, shard: int) -> list[int]:
        """Return the workers that a shard failed on."""
        return self.failures.get(shard, [])

    def note_failure(self, shard: int, worker: int) -> list[int]:
        """Note that a shard failed on a worker, and return all on which it did."""
        self.failures.setdefault(shard, []).append(worker)
        return self.failures[shard]


class OpenSteps:
    """The steps that are open, in the order in which they were begun, and where the run stands.

    Args:
        applied: updates made so far.
        left_open: steps that are not in them, though later ones are.
        running: is told which shards are being computed that nobody holds.
        staleness: the most updates between parameters and gradient. Above 0 several steps may be
            open: then it is known which of those that are ready is the oldest, and whether the
            others can wait for it.
    """

    def __init__(
        self, applied: int, left_open: Iterable[int], running: Running, staleness: float = inf
    ) -> None:
        self.applied = applied
        self.running = running
        self.applying: int | None = None  # the step whose update is being made
        self.ready: dict[int, OpenStep] = {}  # steps of which enough is kept, by number
        self.by_number: dict[int, OpenStep] = {}
        self._begun = 0
        self._with_todo: list[tuple[int, int]] = []  # (order, number) of those that have some
        self._left_open = {*left_open}  # not applied, though later ones are
        self._staleness = staleness
        self._deadlines = Deadlines()
        # A heap of (version, order, number) of those that are ready, and of some that are not any
        # more, or are of another version.
        self._by_age: list[tuple[int, int, int]] = []
        self._open_of: dict[int, set[int]] = {}  # by worker, the steps of which it holds shards
        # Steps that nobody has begun: those left open or skipped, in order, and all from _top on.
        self._skipped = sorted(self._left_open)
        self._top = applied + len(self._skipped)

    @property
    def with_todo(self) -> Iterator[OpenStep]:
        """The steps with a shard that nobody computes or holds, the oldest first."""
        return (self.by_number[number] for _, number in self._with_todo)

    @property
    def have_todo(self) -> bool:
        """Whether there is such a step."""
        return bool(self._with_todo)

    def expecting(self, task: Task) -> OpenStep | None:
        """Return the step that a task's result may still be in, or None: it would be too late.

        Not the one whose update is being made: its sums are collected, and may be added to no more.
        """
        step = self.by_number.get(task.step)
        if step is None or step.number == self.applying:
            return None
        if task.count == 1:
            return step if task.shard not in step.kept else None
        return step if not all(shard in step.kept for shard in task.shards) else None

    # --- who computes and holds what --------------------------------------------------------------

    def give(self, task: Task, copied: Sequence[Expected] | None = None) -> None:
        """Note that a worker computes shards.

        Args:
            copied: what is expected of both, if another computes the same shard.
        """
        step = self.by_number[task.step]
        if copied is not None:
            self._split(step, step.computing[task.shard])
            task.is_split, step.copied[task.shard] = True, copied
            step.copies[task.shard] = task
            self._recount(step, task.shard, was_running=True)
        else:
            step.todo.take(task.shards)
            if not step.todo:
                del self._with_todo[bisect_left(self._with_todo, (step.order, step.number))]
            step.computing.update(dict.fromkeys(task.shards, task))
            step.running += task.count
            if self.running.is_asked:
                self.running.put(task, task.shards)
        if self._staleness:
            self._note_age(step)

    def end(self, task: Task) -> None:
        """Note that a worker computes its shards no more, and does not hold them yet."""
        if (step := self.by_number.get(task.step)) is None:
            return
        if not task.is_split:  # nobody else computes or holds any of them
            for shard in task.shards:
                del step.computing[shard]
            step.running -= task.count
            if self.running.is_asked:
                self.running.drop(task.step, task.shard)
            return
        for shard in task.shards:
            copy = step.copies.pop(shard, None)
            if step.computing[shard] is not task:
                pass  # its own was the copy
            elif copy is not None:
                step.computing[shard] = copy
            else:
                del step.computing[shard]
            if shard not in step.kept:
                self._recount(step, shard, was_running=True)

    def keep(self, step: OpenStep, shards: Collection[int], task: Task) -> None:
        """Note that a worker holds shards that nobody held."""
        worker = task.worker
        step.kept |= dict.fromkeys(shards, task)
        task.earlier, step.held[worker] = step.held.get(worker), task
        for shard in shards if step.computing else ():
            if shard in step.computing:  # by another one
                self._recount(step, shard, was_running=True)
        if len(step.kept) >= step.needed:
            self.ready[step.number] = step
        if self._staleness:
            self._open_of.setdefault(worker, set()).add(step.number)
            self._note_age(step)

    def held_by(self, worker: int) -> list[OpenStep]:
        """Return the steps of which a worker may hold shards, in the order of their numbers."""
        if not self._staleness:
            return [*self.by_number.values()]
        return [self.by_number[number] for number in sorted(self._open_of.get(worker, ()))]

    def lose(self, step: OpenStep, worker: int) -> bool:
        """Forget what a worker held of a step; return whether it was anything."""
        task = step.held.pop(worker, None)
        if task is None:
            return False
        lost = []
        while task is not None:
            lost += [shard for shard in task.shards if step.kept.get(shard) is task]
            task = task.earlier
        for shard in lost:
            del step.kept[shard]
            if shard in step.computing:
                self._recount(step, shard, was_running=False)
        if not step.is_ready:
            self.ready.pop(step.number, None)
        self._forget_held(step, worker)
        self._put_back(step, lost, lost_with=worker)
        return True

    def put_back(self, task: Task, *, is_lost: bool = False) -> None:
        """Have a task's shards dealt again, those that nobody computes or holds.

        Args:
            is_lost: whether the worker of the task has left.
        """
        if (step := self.by_number.get(task.step)) is not None:
            self._put_back(step, task.shards, lost_with=task.worker if is_lost else None)

    def _put_back(
        self, step: OpenStep, shards: Iterable[int], lost_with: int | None = None
    ) -> None:
        had_todo = bool(step.todo)
        again = [s for s in shards if s not in step.kept and s not in step.computing]
        step.todo.add(again)
        if lost_with is not None:
            step.lost_with |= dict.fromkeys(again, lost_with)
        if step.todo and not had_todo:
            insort(self._with_todo, (step.order, step.number))
        if self._staleness:
            self._note_age(step)

    def _split(self, step: OpenStep, task: Task) -> None:
        """Have each shard of a worker's task stand for itself: another gets one of them."""
        if not task.is_split:
            task.is_split = True
            self.running.drop(step.number, task.shard)
            for shard in task.shards:
                self._recount(step, shard, was_running=True)

    def _recount(self, step: OpenStep, shard: int, *, was_running: bool) -> None:
        """Note who now computes a shard that has been computed by two."""
        task = None if shard in step.kept else step.computing.get(shard)
        step.running += (task is not None) - was_running
        self.running.drop(step.number, shard)
        if task is None:
            return
        copy = step.copies.get(shard)
        if copy is None:
            self.running.put(task, range(shard, shard + 1))
        elif step.needed < step.shards:  # else nobody asks for those that two compute
            lower = min(task.worker, copy.worker)
            self.running.put_two(lower, step.number, shard, step.copied[shard])

    def _forget_held(self, step: OpenStep, worker: int) -> None:
        if (held := self._open_of.get(worker)) is not None:
            held.discard(step.number)
            if not held:
                del self._open_of[worker]

    # --- which is applied next --------------------------------------------------------------------

    def _note_age(self, step: OpenStep) -> None:
        """Note that others compute or hold shards of a step: it may have another version."""
        version = step.version
        if version is not None and step.number in self.ready:
            heappush(self._by_age, (version, step.order, step.number))
        if self._staleness == inf:
            return
        if version is None:
            self._deadlines.drop(step.number)
        else:
            self._deadlines.put(step.number, version)

    def oldest_ready(self) -> OpenStep | None:
        """Return the step with the oldest version of those of which enough is kept.

        Of those that are equally old the one that was begun first.
        """
        if len(self.ready) <= 1:
            return next(iter(self.ready.values()), None)
        while True:
            version, _, number = self._by_age[0]
            step = self.ready.get(number)
            if step is not None and step.version == version:
                return step
            heappop(self._by_age)

    def leaves_time(self, step: OpenStep) -> bool:
        """Return whether, after this step, the others can all be applied before they are stale.

        They can if they can in the order of their versions. One that nobody has anything of does
        not count: if it is dealt at once, it is from after this update, and no more are open than
        the rule bears.
        """
        if len(self.by_number) == 1 or self._staleness == inf:
            return True
        return self._deadlines.least_without(step.number) >= self.applied + 1 - self._staleness

    # --- which steps ------------------------------------------------------------------------------

    @property
    def next_unbegun(self) -> int:
        """The first step that nobody has begun."""
        return self._skipped[0] if self._skipped else self._top

    def next_to_begin(self, within: int, end: int, next_home: Callable[[int, int], int]) -> int:
        """Return the first step that nobody has begun, or one a little later that is at home.

        Args:
            within: how many steps to look through, from the first on.
            end: steps from this number on do not exist.
            next_home: from two steps to the first at home from the one on and before the other,
                or the latter.
        """
        first = self.next_unbegun
        stop = min(first + within, end)
        step = next_home(first, stop)
        while step < stop:
            place = bisect_left(self._skipped, step)
            if step >= self._top or self._skipped[place : place + 1] == [step]:
                return step
            step = next_home(step + 1, stop)
        return first

    def begin(self, number: int, shards: int, needed: int, now: float) -> OpenStep:
        """Open a step that nobody has begun. The ones before it that nobody has are skipped."""
        if number < self._top:
            del self._skipped[bisect_left(self._skipped, number)]
        else:
            self._skipped += range(self._top, number)
            self._top = number + 1
        step = OpenStep(number, self._begun, shards, needed, now, Todo(shards))
        self._with_todo.append((self._begun, number))
        self._begun += 1
        self.by_number[number] = step
        return step

    def close(self, number: int) -> None:
        """Note that the update of a step is made."""
        step = self.by_number.pop(number)
        self.ready.pop(number, None)
        self._forget(step)
        for shard in step.computing:
            self.running.drop(number, shard)
        if self._staleness:
            for worker in step.held:
                self._forget_held(step, worker)
            self._deadlines.drop(number)
        end = self.applied + len(self._left_open)  # the step after the last that is applied
        if number < end:
            self._left_open.remove(number)
        elif number > end:
            self._left_open.update(range(end, number))
        self.applied += 1
        self.applying = None

    def give_back_untouched(self) -> None:
        """Count the steps of which nobody computes or holds anything among those not begun."""
        for step in [step for step in self.with_todo if len(step.todo) == step.shards]:
            self._forget(self.by_number.pop(step.number))
            insort(self._skipped, step.number)

    def _forget(self, step: OpenStep) -> None:
        if step.todo:
            del self._with_todo[bisect_left(self._with_todo, (step.order, step.number))]

    def ask(self) -> None:
        """Have ``running`` know what is being computed: from now on it is asked."""
        self.running.is_asked = True
        for step in self.by_number.values():
            for task in step.tasks:
                self.running.put(task, task.shards)

    @property
    def left_open(self) -> list[int]:
        """The steps that are not applied, though later ones are, in order."""
        return sorted(self._left_open)
