"""Dealing: who computes which shard, who computes a copy of a shard, and why.

Every worker has home shards, so that its rows can be fetched ahead and its results add up to few
vectors. An idle worker receives

1. an unassigned shard: a home shard if possible;
2. else, a copy of a shard whose worker is far behind its usual time;
3. else, a copy of a shard whose worker is so slow that the idle worker will be done clearly before.

The first copy to be done counts; the second is discarded. The choice among copies never changes the
result, only its time: a shard is the same on every worker.

Hazards, beside speed:

- A worker that receives a shard has the shard until the worker answers, though the step may be over
  long before. A superfluous shard near the end of a quorum's step makes the worker late for the
  next step and for those after it: see ``_is_of_use``.
- Times differ from run to run. Under a rule that keeps the bits, times may decide who computes a
  shard and which shard is computed twice, and nothing else.
- An idle worker without a shard is considered again only at the next event. If time alone would
  change the answer, ``look_again_at`` must name the time, or the run may stand still.
- An event costs O(log N): ``open_steps.py``, ``workers.py`` and ``running_shards.py`` keep
  everything sorted, and no event looks at all workers.

Legend: V shards of a step, N workers, t step, s shard, w worker. Times are in seconds of one
monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from quorate.coordination.open_steps import OpenStep, OpenSteps
from quorate.coordination.protocol import Compute
from quorate.coordination.rules import Rule
from quorate.coordination.running_shards import Forecast, WorkerShard
from quorate.coordination.workers import Assignment, Workers


class StepLayout(NamedTuple):
    """The steps of a run, and the home shards of workers; pure functions.

    Args:
        shards_of: V of a step.
        home_shards: from (rank, number of workers) and a step to the worker's home shards.
        next_home: from (rank, number of workers) and two steps a and b to the first step of [a, b)
            with a home shard of the worker, or b.
        lookahead: number of steps, from the next one on, among which a worker begins a home step.
    """

    shards_of: Callable[[int], int]
    home_shards: Callable[[tuple[int, int], int], range]
    next_home: Callable[[tuple[int, int], int, int], int]
    lookahead: int


@dataclass(eq=False)
class Dealer:
    """Deals shards to idle workers.

    Args:
        layout: steps and home shards.
        last_step: number of updates at the end of the run; a stop reduces the number.
        steps: the open steps. The dealer begins steps.
        workers: the workers. The dealer gives them assignments.
        rule: how many shards a step needs, how stale a gradient may be, whether copies are made.
        most_open: how many steps may be open under any rule; bounds the memory for results.
        patience: a shard is late when it has taken this many times the usual time.
        run_s: the usual time of the longest run that is dealt at once. 0: single shards.
    """

    layout: StepLayout
    last_step: int
    steps: OpenSteps
    workers: Workers
    rule: Rule
    most_open: float
    patience: float
    run_s: float
    look_again_at: float = inf  # when an idle worker may help with a shard that becomes late

    def __post_init__(self) -> None:
        # An open step is applied after all steps that are open now, at the latest. With at most
        # K + 1 steps open, the last of them is still fresh enough, in any order.
        self.most_open = min(self.rule.staleness + 1, self.most_open)

    def deal(self, now: float) -> list[Compute]:
        """Deal a shard to every idle worker that can be of use, and set ``look_again_at``."""
        self.look_again_at = inf
        dealt: list[Compute] = []
        idle = self.workers.idle
        # 1. Unassigned shards.
        if idle and self._has_more() and self._may_be_of_use(now):
            for worker in tuple(idle):
                if (choice := self._choose_shard(worker, now)) is not None:
                    dealt.append(self._give(worker, *choice, now))
                    if not (idle and self._has_more()):
                        break
        # 2. Copies of shards that are late or slow.
        if not (idle and self.steps.running.is_in_use):
            return dealt
        if self._may_copy(now):
            for worker in tuple(idle):
                if (copy := self._choose_copy(worker, now)) is not None:
                    dealt.append(self._give_copy(worker, *copy, now))
                    if not self._may_copy(now):
                        break
        # 3. The time of the next look; ``_may_copy`` was the last to look at the running shards.
        if idle and len(self.steps.ready) < len(self.steps.by_number):
            self.look_again_at = self.steps.running.next_late_at()
        return dealt

    def _give(
        self,
        worker: int,
        step: OpenStep,
        run: range,
        reason: str,
        now: float,
        forecast: Forecast | None = None,
        instead_of: int | None = None,
    ) -> Compute:
        """Assign the first shard of a run, or more of the run, to a worker."""
        usual_shard_s = self.workers.by_number[worker].usual_shard_s
        count = 1 if len(run) == 1 else self._count(step, usual_shard_s, run)
        # The version is that of now, not of the step's beginning: a shard that was lost with its
        # worker is computed afresh, from the parameters as they are.
        applied = self.steps.applied
        assignment = Assignment(worker, step.number, run.start, applied, now, count, usual_shard_s)
        self.workers.assign(worker, assignment)
        self.steps.assign(assignment, forecast)
        compute = Compute(
            worker,
            step.number,
            run.start,
            reason,
            self.workers.rank_of(worker),
            instead_of,
            is_needed=step.needed == step.shards,
            count=count,
        )
        if step.lost_with:  # a worker left: rare
            lost_with = [step.lost_with.pop(s, None) for s in assignment.shards]
            compute.lost_with = next((w for w in lost_with if w is not None), None)
        return compute

    def _count(self, step: OpenStep, usual_shard_s: float | None, run: range) -> int:
        """Return how many shards of a run, from the first on, a worker receives at once.

        The run must be over before any worker would wait for a part of it. If the run is late, its
        shards are taken over singly.

        Args:
            usual_shard_s: usual time of a shard on the worker, if known.
            run: unassigned home shards of the worker.
        """
        may_run = self.run_s > 0 and step.has_runs and step.needed == step.shards
        first = run.start
        if not may_run or usual_shard_s is None or step.failed_on(first):
            return 1
        most = min(int(self.run_s / max(usual_shard_s, 1e-9)), len(run))
        if step.failures:
            failed = (s - first for s in range(first + 1, first + most) if s in step.failures)
            most = next(failed, most)
        return max(1, most)

    # --- unassigned shards ------------------------------------------------------------------------

    def _choose_shard(self, worker: int, now: float) -> tuple[OpenStep, range, str] | None:
        """Return a step, a run of its unassigned shards for a worker, and the reason.

        The oldest step comes first: it is the next to be applied, and the first to become stale.
        """
        usual_shard_s = self.workers.by_number[worker].usual_shard_s
        for step in self._steps_to_deal(worker, now):
            unassigned = step.unassigned
            if not self._is_of_use(step, usual_shard_s, now):
                continue
            barred = [
                s for s in step.failures if s in unassigned and self._is_barred(step, worker, s)
            ]
            if barred and len(barred) == len(unassigned):
                continue
            for shard in barred:
                unassigned.take(range(shard, shard + 1))
            # No home shard: the end of the longest run, so that the shards before it stay together
            # for their owner, who works from the front and hands over few vectors.
            home = self.layout.home_shards(self.workers.rank_of(worker), step.number)
            own = unassigned.first_in(home)
            run = unassigned.longest()[-1:] if own is None else own
            unassigned.add(barred)
            return step, run, "nobody has begun it" if own is None else "home shard"
        return None

    def _steps_to_deal(self, worker: int, now: float) -> Iterator[OpenStep]:
        """Yield the steps with unassigned shards, and last, if one may be opened, a new step."""
        yield from self.steps.with_unassigned
        if self._may_begin():
            yield self._begin(worker, now)

    def _may_be_of_use(self, now: float) -> bool:
        """Return whether the first open step may need an idle worker for an unassigned shard.

        A step of a quorum that has no use for the fastest idle worker, the slowest, or a worker of
        unknown speed has no use for any.
        """
        step = self._first_step()
        if step is None or step.needed == step.shards:
            return True
        known = self.workers.idle_usual_shard_s
        speeds: list[float | None] = [*known[:1], *known[-1:]]
        if len(known) < len(self.workers.idle):
            speeds.append(None)
        return any(self._is_of_use(step, usual_shard_s, now) for usual_shard_s in speeds)

    def _is_of_use(self, step: OpenStep, usual_shard_s: float | None, now: float) -> bool:
        """Return whether a step may need a shard beyond those that are held and running.

        A quorum leaves shards over, and an idle worker could always begin one. At the beginning of
        a step the worker should: nobody knows yet who will be late. Later, a superfluous shard
        would be computed in vain. Worse, the step would be over while the worker computes: the
        worker would begin the next step late, be dropped there too, and so on, out of phase for
        good, although as fast as all. So the worker waits for the next step, unless the step needs
        the worker, or the worker will be done before a shard that the quorum counts on.

        Args:
            usual_shard_s: usual time of a shard on the worker, if known.
        """
        if step.wanting <= 0:
            return False
        # All shards are needed, or the step begins at this event.
        if step.needed == step.shards or step.begun_at == now:
            return True
        if len(step.running) < step.wanting or usual_shard_s is None:
            return True
        # A worker that abandons a shard is back a little after the step has begun. Without this
        # grace the worker would sit out every step after a step in which it was late.
        if now <= step.begun_at + (self.patience - 1) * usual_shard_s:
            return True
        # Of the running shards, the last that the quorum waits for. A late shard is expected never:
        # a new shard is as good as a copy of the late shard, and either may be first.
        self.steps.running.advance(now)
        return now + usual_shard_s <= self.steps.running.done_at(step.wanting)

    def _first_step(self) -> OpenStep | None:
        """Return the earliest begun of the open steps."""
        return next(iter(self.steps.by_number.values()), None)

    def _has_more(self) -> bool:
        """Return whether an unassigned shard exists, or a step may be opened."""
        return bool(self.steps.with_unassigned) or self._may_begin()

    def _may_begin(self) -> bool:
        """Return whether a step may be opened."""
        are_open = len(self.steps.by_number)
        # A worker alone that opened a second step would only make its own gradients stale.
        if are_open and (are_open >= self.most_open or len(self.workers.by_number) <= 1):
            return False
        return self.steps.applied + are_open < self.last_step

    def _begin(self, worker: int, now: float) -> OpenStep:
        """Open the next step, or a home step of the worker a little later."""
        layout = self.layout
        number = self.steps.next_to_begin(
            layout.lookahead,
            self.last_step,
            lambda a, b: layout.next_home(self.workers.rank_of(worker), a, b),
        )
        shards = layout.shards_of(number)
        return self.steps.begin(number, shards, self.rule.needed(shards), now)

    def _is_barred(self, step: OpenStep, worker: int, shard: int) -> bool:
        """Return whether the shard failed on this worker and other workers may try.

        A worker that crashed in a shard is back under its number, and is the same worker.
        """
        failed_on = step.failed_on(shard)
        return worker in failed_on and not self.workers.are_all_in(failed_on)

    # --- copies -----------------------------------------------------------------------------------

    def _may_copy(self, now: float) -> bool:
        """Return whether the fastest idle worker may be of help with a copy."""
        self.steps.running.advance(now)
        usual_shard_s = next(iter(self.workers.idle_usual_shard_s), inf)
        if not self.steps.running.may_help(now + self.patience * usual_shard_s):
            return False
        return next(self._copies(usual_shard_s, now), None) is not None

    def _choose_copy(self, worker: int, now: float) -> tuple[WorkerShard, str] | None:
        """Return a shard to compute a copy of, and the reason; None if no copy helps."""
        for original, reason in self._copies(self.workers.by_number[worker].usual_shard_s, now):
            if worker not in self.steps.by_number[original.step].failed_on(original.shard):
                return original, reason
        return None

    def _copies(self, usual_shard_s: float | None, now: float) -> Iterator[tuple[WorkerShard, str]]:
        """Yield shards of which a worker with this usual time should compute a copy, and reasons.

        First the shards that are late, the furthest behind first; then the shards that will be done
        last, as long as the worker will be done clearly before. Clearly, because a copy costs
        twice: the time of the loser, and time of the next step, for which the winner may be late.
        Two copies are enough: a third would help only if both were held up.
        """
        most_late, most_slow = None, None
        step = self._first_step()
        assert step is not None
        if step.wanting < len(step.running) and len(self.steps.by_number) == 1:
            # A quorum waits for the shards that will be in first, and for a late shard only if
            # the others are not enough.
            on_time = self.steps.running.on_time
            most_late = max(0, step.wanting - on_time)
            most_slow = max(0, min(step.wanting, on_time))
        for original in self.steps.running.late(most_late):
            yield original, f"worker {original.worker} is slow: far behind its usual time"
        if usual_shard_s is None:
            return
        for done_at, original in self.steps.running.last_to_finish(most_slow):
            if done_at <= now + self.patience * usual_shard_s:
                return
            yield original, f"worker {original.worker} is slow"

    def _give_copy(self, worker: int, original: WorkerShard, reason: str, now: float) -> Compute:
        """Assign a copy of a shard to a worker."""
        step, slow = self.steps.by_number[original.step], original.worker
        run = range(original.shard, original.shard + 1)
        first = step.computing[original.shard]
        usual_shard_s = (
            self.workers.usual_shard_s_of_all
            if first.usual_shard_s is None
            else first.usual_shard_s
        )
        starts = [
            (first.since, usual_shard_s * first.count),
            (now, self.workers.expected_s(worker)),
        ]
        early, late = sorted(Forecast(at + self.patience * s, at + s) for at, s in starts)
        forecast = Forecast(early.late_at, min(early.done_at, late.done_at), later=late)
        if early.late_at <= now:
            forecast = late
        return self._give(worker, step, run, reason, now, forecast, instead_of=slow)
