"""Open steps, plainly: see ``quorate.coordination.open_steps``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from support.plain.members import Task


class Kept(NamedTuple):
    """A result that counts."""

    worker: int  # who holds it
    version: int


@dataclass
class OpenStep:
    """A step that was begun and is not applied."""

    number: int
    shards: int
    needed: int  # of them
    begun_at: float
    todo: set[int]  # nobody computes or holds them
    kept: dict[int, Kept] = field(default_factory=dict)  # by shard
    failures: dict[int, list[int]] = field(default_factory=dict)  # shard -> workers it failed on
    homes: dict[int, range] = field(default_factory=dict)  # by worker; empty: not known any more
    copied: dict[int, list[tuple[float, float]]] = field(default_factory=dict)  # behind, done at
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
    """

    def __init__(self, applied: int, left_open: Iterable[int]) -> None:
        self.applied = applied
        self.applying: int | None = None  # the step whose update is being made
        self._open: dict[int, OpenStep] = {}  # by number
        # Steps that nobody has begun: those left open or skipped, in order, and all from _top on.
        self._skipped = sorted(left_open)
        self._top = applied + len(self._skipped)

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenStep]:
        return iter(self._open.values())

    def __getitem__(self, number: int) -> OpenStep:
        return self._open[number]

    @property
    def have_todo(self) -> bool:
        """Whether a step has a shard that nobody computes or holds."""
        return any(step.todo for step in self._open.values())

    def expecting(self, task: Task) -> OpenStep | None:
        """Return the step that a task's result may still be in, or None: it would be too late.

        Not the one whose update is being made: its sums are collected, and may be added to no more.
        """
        step = self._open.get(task.step)
        if step is None or step.number == self.applying:
            return None
        return step if not step.kept.keys() >= {*task.shards} else None

    def next_to_begin(self, within: int, end: int, is_home: Callable[[int], bool]) -> int:
        """Return the first step that nobody has begun, or one a little later that is at home.

        Args:
            within: how many steps to look through, from the first on.
            end: steps from this number on do not exist.
        """
        first = self._skipped[0] if self._skipped else self._top
        if within == 1:
            return first
        end_of_search = min(max(first + within, self._top), end)
        candidates = chain(self._skipped, range(self._top, end_of_search))
        return next((t for t in candidates if t < first + within and is_home(t)), first)

    def begin(self, number: int, shards: int, needed: int, now: float) -> OpenStep:
        """Open a step that nobody has begun. The ones before it that nobody has are skipped."""
        if number < self._top:
            self._skipped.remove(number)
        else:
            self._skipped += range(self._top, number)
            self._top = number + 1
        step = OpenStep(number, shards, needed, now, todo=set(range(shards)))
        self._open[number] = step
        return step

    def close(self, number: int) -> None:
        """Note that the update of a step is made."""
        del self._open[number]
        self.applied += 1
        self.applying = None

    def give_back_untouched(self) -> None:
        """Count the steps of which nobody computes or holds anything among those not begun."""
        for step in [step for step in self if len(step.todo) == step.shards]:
            del self._open[step.number]
            self._skipped = sorted([*self._skipped, step.number])

    def forget_homes(self) -> None:
        """Forget who is at home where: ranks have changed."""
        for step in self:
            step.homes.clear()

    def left_open(self, *, once_applied: int | None = None) -> list[int]:
        """Return the steps that are not applied, though later ones are.

        Args:
            once_applied: a step to count as applied.
        """
        end = self._top
        steps = sorted([*self._skipped, *(self._open.keys() - {once_applied})])
        while steps and steps[-1] == end - 1:  # nothing later is applied
            end -= 1
            steps.pop()
        return steps
