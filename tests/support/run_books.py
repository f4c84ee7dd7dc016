"""Books: what a simulated run holds by its own account, whatever the coordinator thinks.

Who computes what since when, which results are kept where, and what follows: who may compute what,
who is expected when, and what would be in vain.

Legend: V shards of a step, t step, s shard, w worker. Times are virtual seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from quorate.coordination.protocol import Apply, Effect, Event
from quorate.coordination.rules import Rule
from quorate.coordination.tree import TreeSum


class InvariantError(AssertionError):
    """Something that must never happen did, or the run waits for an event that will not come."""


@dataclass(eq=False)
class Task:
    """A run of shards that a worker computes, one as a rule."""

    step: int
    shards: range
    version: int  # updates made when it was begun
    since: float
    lost: set[int] = field(default_factory=set)  # shards: the worker was told, or came too late


@dataclass(eq=False)
class Worker:
    """One life of a worker."""

    task: Task | None = None
    times_s: list[float] = field(default_factory=list)  # of the shards that it has done
    is_replaced: bool = False

    @property
    def usual_s(self) -> float | None:
        return median(self.times_s[-15:]) if self.times_s else None


@dataclass
class Results:
    """What a worker has computed: it outlives the worker that leaves with ``results_stay``."""

    pending: dict[tuple[int, int], Task] = field(default_factory=dict)  # nor kept nor discarded
    sums: dict[int, TreeSum[str]] = field(default_factory=dict)  # per step, what was kept
    versions: dict[tuple[int, int], int] = field(default_factory=dict)  # of what was kept


@dataclass
class OpenStep:
    """A step that was begun and is not applied."""

    begun_at_event: int
    begun_at: float
    failed_on: dict[int, list[int]] = field(default_factory=dict)  # shard -> workers
    kept_now: set[int] | None = None  # shards, until the sums change


class Books:
    """The state of a simulated run. Who inherits from it sets and changes what is here."""

    rule: Rule
    shards_of: Callable[[int], int]
    applied: int
    now: float
    log: deque[tuple[float, Event, Sequence[Effect]]]
    _workers: dict[int, Worker]
    _results: dict[int, Results]  # of workers who are or were there
    _open: dict[int, OpenStep]
    _applying: tuple[Apply, str] | None  # and the sum that was collected for it
    # By step and shard that two compute: how long each took usually when the second began.
    _frozen: dict[tuple[int, int], dict[int, float]]
    _events: int
    _end: int  # updates applied at the end, stopped or not
    _most_open: float
    _patience: float
    _timeout_s: float | None

    def _rank_of(self, worker: int) -> tuple[int, int]:
        return sum(other < worker for other in self._workers), len(self._workers)

    def _kept(self, step: int) -> set[int]:
        """Shards of an open step that are in sums which are still there."""
        found = self._open[step]
        if found.kept_now is None:
            found.kept_now = {
                shard
                for results in self._results.values()
                if (tree := results.sums.get(step)) is not None
                for level, index in tree.parts
                for shard in range(index << level, min((index + 1) << level, tree.leaves))
            }
        return found.kept_now

    def _is_wanted(self, step: int, shard: int) -> bool:
        """Whether a result may still be in its step's update."""
        applying = self._applying is not None and self._applying[0].step == step
        return step in self._open and not applying and shard not in self._kept(step)

    def _running(self, step: int) -> dict[int, list[int]]:
        """Who computes the shards of a step that nobody holds."""
        running: dict[int, list[int]] = {}
        kept = self._kept(step)
        for worker, member in self._workers.items():
            task = member.task
            if task is not None and task.step == step:
                for shard in set(task.shards) - kept:
                    running.setdefault(shard, []).append(worker)
        return running

    def _versions(self, step: int, *, running: bool = True) -> list[int]:
        """The parameters that the gradients of an open step are from, or will be."""
        tasks = [m.task for m in self._workers.values() if m.task is not None]
        kept = [
            version
            for results in self._results.values()
            if step in results.sums
            for (number, _), version in results.versions.items()
            if number == step
        ]
        return kept + [task.version for task in tasks if running and task.step == step]

    def _loose(self, step: int) -> set[int]:
        """Shards of a step that nobody computes or holds."""
        return set(range(self.shards_of(step))) - self._kept(step) - self._running(step).keys()

    def _may_compute(self, worker: int, step: int, shards: set[int]) -> bool:
        """Whether one of the shards has not failed on this worker, or has on every one."""
        failures = self._open[step].failed_on
        failed_on = (set(failures.get(shard, ())) for shard in shards)
        return any(worker not in those or self._workers.keys() <= those for those in failed_on)

    def _may_begin(self) -> bool:
        """Whether the rule lets someone begin one more step: alone, nobody works ahead."""
        alone = len(self._workers) < 2
        most = 1 if alone else min(self.rule.staleness + 1, self._most_open)
        return len(self._open) < most and self.applied + len(self._open) < self._end

    def _wants(self, step: int) -> int:
        """How many shards of a step somebody should begin at least.

        At its opening, when nobody knows who will be late, any.
        """
        if self._open[step].begun_at_event == self._events:
            return self.shards_of(step)
        needed = self.rule.needed(self.shards_of(step))
        return needed - len(self._kept(step)) - len(self._running(step))

    def _have_work(self, workers: Iterable[int]) -> list[int]:
        """Which of these may begin a step, or compute what is needed and nobody computes."""
        if self._may_begin():
            return list(workers)
        loose = {step: self._loose(step) for step in self._open if self._wants(step) > 0}
        return [w for w in workers if any(self._may_compute(w, *each) for each in loose.items())]

    def _expected_s(self, member: Worker) -> float:
        """How long a shard usually takes there; of the others before one is done; infinite."""
        known = [m.usual_s for m in self._workers.values() if m.usual_s is not None]
        return member.usual_s or (median(known) if known else math.inf)

    def _is_in_vain(self, worker: int, step: int) -> bool:
        """Whether enough others are expected to be done with a step before this worker."""
        own_s = self._workers[worker].usual_s
        if self._wants(step) > 0 or own_s is None:
            return False
        if self.now <= self._open[step].begun_at + (self._patience - 1) * own_s:
            return False  # whoever was told to leave off is back by then
        others = []
        for shard, runners in self._running(step).items():
            ends = []
            for runner in runners:
                member = self._workers[runner]
                assert member.task is not None
                frozen = self._frozen[step, shard] if len(runners) > 1 else {}
                usual_s = frozen.get(runner, self._expected_s(member))
                is_behind = member.task.since + self._patience * usual_s <= self.now
                ends.append(math.inf if is_behind else member.task.since + usual_s)
            others.append(min(ends))
        wanted = self.rule.needed(self.shards_of(step)) - len(self._kept(step))
        return self.now + own_s > sorted(others)[wanted - 1]

    def _silent_at(self, member: Worker) -> float:
        """When a worker is to be replaced if it has not answered before."""
        if self._timeout_s is None or member.task is None or member.is_replaced:
            return math.inf
        usual_s = (member.usual_s or 0.0) * len(member.task.shards)
        return member.task.since + max(self._timeout_s, 3 * usual_s)

    def _violation(self, message: str) -> InvariantError:
        lines = [f"  {at:g}: {event} -> {list(effects)}" for at, event, effects in self.log]
        return InvariantError("\n".join([f"{message} (after {self.applied} updates)", *lines]))
