"""Effects of a coordinator, carried out by workers that only pretend: each if it may be.

Legend: V shards of a step, t step, s shard, w worker. Times are virtual seconds.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable

from support.event_queue import EventQueue
from support.judge import Judge
from support.run_books import OpenStep, Results, Task, Worker
from support.shown_sums import add, leaf, whole_sum

from quorate.coordination.protocol import (
    Abort,
    Applied,
    Apply,
    Cancel,
    Cancelled,
    Compute,
    Discard,
    Done,
    Effect,
    Event,
    Failed,
    Finish,
    Keep,
    Left,
    Replace,
    Tick,
    Wake,
)
from quorate.coordination.tree import TreeSum, tree_sum


class Effects(Judge):
    """Carries out effects, and refuses what must never be asked for.

    Who inherits from it calls ``_carry_out``; what comes of an effect later is in ``_queue``.
    """

    steps: int  # updates applied at the end
    computed: Counter[int]  # worker -> results of its that were kept
    copies: int  # shards that were dealt while another worker was computing them
    replaced: list[int]  # workers
    runs: int  # of several shards that were dealt
    _queue: EventQueue
    _single: set[int]  # steps in which a run crashed, or a shard of it failed
    _home_shards: Callable[[tuple[int, int], int], range]
    _lookahead: int
    _run_s: float
    _time_s: Callable[[int, int, int], float]
    _fails: Callable[[int, int, int], bool]
    _leaves_off_s: float
    _apply_s: float
    _end_s: float
    _results_stay: bool

    def _carry_out(self, effect: Effect, event: Event) -> None:
        if self.finish is not None or self.abort is not None:
            raise self._violation(f"the run is over, and then {effect}")
        match effect:
            case Compute():
                self._compute(effect)
            case Keep(worker, step, first, count):
                for shard in range(first, first + count):
                    if not self._is_wanted(step, shard):
                        raise self._violation(f"nobody needs this result any more: {effect}")
                    results, task = self._result(effect, shard)
                    tree = results.sums.setdefault(step, TreeSum(self.shards_of(step), add))
                    tree.put((0, shard), leaf(step, shard))
                    results.versions[step, shard] = task.version
                    self._open[step].kept_now = None
                    self.computed[worker] += 1
            case Discard(worker, step, first, count):
                kept = self._kept(step) if step in self._open else set()
                for shard in range(first, first + count):
                    if self._is_wanted(step, shard) or not self.rule.copies:
                        raise self._violation(f"it was not in vain: {effect}")
                    _, task = self._result(effect, shard)
                    self._lose(worker, task, shard, kept)
            case Cancel(worker, step, shard):
                if (worker, step, shard) not in self._to_tell or not self.rule.copies:
                    raise self._violation(f"it is not in vain: {effect}")
                self._to_tell.remove((worker, step, shard))
                self._cancel(effect)
            case Apply():
                self._apply(effect)
            case Replace(worker):
                if not isinstance(event, Tick):
                    raise self._violation(f"a result may be under way, and yet {effect}")
                self._replace(effect)
            case Wake(at):
                # At once is allowed, but not after a tick: that would never end.
                if at < self.now or (at == self.now and isinstance(event, Tick)):
                    raise self._violation(f"at {self.now} the coordinator asks for {effect}")
                if self._wake_at is not None:
                    raise self._violation(f"the coordinator asks for two ticks: {effect}")
                self._wake_at = at
            case Abort(_, step, shard):
                failed_on = self._open[step].failed_on.get(shard, []) if step in self._open else []
                if len(failed_on) < self._attempts and not self._workers.keys() <= set(failed_on):
                    raise self._violation(f"someone could try shard {shard} again: {effect}")
                self.abort = effect
            case Finish(step):
                if step != self.applied or step != self._end:
                    raise self._violation(f"it is not {self._end} updates at {effect}")
                self.finish = effect

    def _compute(self, effect: Compute) -> None:
        worker, number = effect.worker, effect.step
        member = self._workers.get(worker)
        if member is None or member.task is not None:
            raise self._violation(f"worker {worker} is not idle: {effect}")
        if effect.rank_of != self._rank_of(worker):
            raise self._violation(f"worker {worker} is at {self._rank_of(worker)}: {effect}")
        if number not in self._open:
            self._begin(effect)
        shards = range(effect.shard, effect.shard + effect.count)
        for shard in shards:
            if shard not in range(self.shards_of(number)) or self._applying:
                raise self._violation(f"there is no such shard to compute now: {effect}")
            if shard in self._kept(number):
                raise self._violation(f"shard {shard} is kept already: {effect}")
            runners = self._running(number).get(shard, [])
            if runners and (not self.rule.copies or len(runners) > 1 or self._have_work([worker])):
                raise self._violation(f"{len(runners)} copies of it are running: {effect}")
            if not runners and self._is_in_vain(worker, number):
                raise self._violation(f"the quorum will be there without it: {effect}")
            if not self._may_compute(worker, number, {shard}):
                raise self._violation(f"shard {shard} failed there and others could try: {effect}")
            if runners and effect.count > 1:
                raise self._violation(f"shard {shard} is a copy, and copies come alone: {effect}")
            if runners:
                both = [*runners, worker]
                self._frozen[number, shard] = {w: self._expected_s(self._workers[w]) for w in both}
            self.copies += len(runners)
        if effect.count > 1:
            self._check_run(effect, member)
        task = member.task = Task(number, shards, self.applied, self.now)
        time_s = 0.0
        for shard in shards:
            time_s += self._time_s(worker, number, shard)
            if self._fails(worker, number, shard):
                self._post_of(worker, task, time_s, Failed(worker, number, shard))
                return
        self._post_of(worker, task, time_s, Done(worker, number, effect.shard))

    def _check_run(self, effect: Compute, member: Worker) -> None:
        """Whether a run is short, of the worker's own, and nobody waits for a part of it."""
        self.runs += 1
        home = self._home_shards(self._rank_of(effect.worker), effect.step)
        is_home = effect.shard in home and effect.shard + effect.count - 1 in home
        if self.rule.needed(self.shards_of(effect.step)) < self.shards_of(effect.step):
            raise self._violation(f"the quorum could do without a part of it: {effect}")
        if not is_home or (member.usual_s or math.inf) * effect.count > self._run_s + 1e-9:
            raise self._violation(f"{home} is at home, and {member.usual_s} s usual: {effect}")
        if effect.step in self._single:
            raise self._violation(f"a run of this step crashed or failed: {effect}")

    def _post_of(self, worker: int, task: Task, after_s: float, event: Event) -> None:
        """Let a worker report later, if it is alive and computing the same thing then."""
        member = self._workers[worker]
        if after_s < math.inf:
            self._queue.post(
                self.now + after_s,
                event,
                lambda: self._workers.get(worker) is member and member.task is task,
            )

    def _begin(self, effect: Compute) -> None:
        if not self._may_begin():
            raise self._violation(f"steps {sorted(self._open)} are open, and then {effect}")
        waiting = (t for t in itertools.count() if t not in self._closed and t not in self._open)
        first = next(waiting)
        if effect.step in self._closed or effect.step >= self.steps:
            raise self._violation(f"there is no such step any more: {effect}")
        if not first <= effect.step < first + self._lookahead:
            raise self._violation(f"step {first} is the next, and then {effect}")
        if effect.step != first and not self._home_shards(
            self._rank_of(effect.worker), effect.step
        ):
            raise self._violation(f"step {first} is before one that is at home elsewhere: {effect}")
        self._open[effect.step] = OpenStep(self._events, self.now)

    def _cancel(self, effect: Cancel) -> None:
        task = self._workers[effect.worker].task
        assert task is not None
        event = Cancelled(effect.worker, effect.step, task.shards[0])
        self._post_of(effect.worker, task, self._leaves_off_s, event)

    def _result(self, effect: Keep | Discard, shard: int) -> tuple[Results, Task]:
        results = self._results.get(effect.worker)
        task = results and results.pending.pop((effect.step, shard), None)
        if results is None or task is None:
            raise self._violation(f"there is no such result: {effect}")
        return results, task

    def _replace(self, effect: Replace) -> None:
        worker = effect.worker
        member = self._workers.get(worker)
        if member is None or member.task is None or member.is_replaced:
            raise self._violation(f"worker {worker} is ended or owes no answer: {effect}")
        if self.now < self._silent_at(member):
            raise self._violation(f"worker {worker} has time left: {effect}")
        member.is_replaced = True
        self.replaced.append(worker)
        left = Left(worker, effect.reason, crashed=True, results_stay=self._results_stay)
        self._queue.post(self.now + self._end_s, left, lambda: self._workers.get(worker) is member)

    def _apply(self, effect: Apply) -> None:
        step = effect.step
        if self._applying is not None or step not in self._open:
            raise self._violation(f"steps {sorted(self._open)} are open, and then {effect}")
        if not self.rule.by_shard and step != self.applied:
            raise self._violation(f"step {self.applied} is the next, and then {effect}")
        self._check_idle()  # whoever can go on does so before the update
        oldest = min(self._versions(step))
        for other in self._open:
            if self._is_ready(other) and min(self._versions(other)) < oldest:
                raise self._violation(f"step {other} is ready and older: {effect}")
        parts = []
        for worker in effect.holders:
            results = self._results.get(worker)
            if results is None or step not in results.sums:
                raise self._violation(f"worker {worker} holds nothing: {effect}")
            parts += results.sums[step].parts.items()
        everyone = {w for w, results in self._results.items() if step in results.sums}
        if everyone != set(effect.holders):
            raise self._violation(f"workers {sorted(everyone)} hold sums, but {effect}")
        shards, kept = self.shards_of(step), self._kept(step)
        needed = self.rule.needed(shards)
        if len(kept) != needed or effect.shards != tuple(sorted(kept)):
            raise self._violation(f"{needed} are needed, {sorted(kept)} are kept at {effect}")
        stale = max(self.applied - version for version in self._versions(step, running=False))
        if stale > self.rule.staleness or effect.staleness != stale:
            raise self._violation(f"it is {stale} updates old: {effect}")
        total = tree_sum(parts, shards, add, present=needed)
        if total != whole_sum(step, shards, kept):
            raise self._violation(f"the sum of step {step} is {total}")
        applying = (effect, total)
        self._applying = applying
        self._queue.post(
            self.now + self._apply_s, Applied(step), lambda: self._applying is applying
        )

    def _lose(self, worker: int, task: Task, shard: int, kept: set[int]) -> None:
        if shard not in task.lost:
            task.lost.add(shard)
            self.fates["copies" if shard in kept else "dropped"][worker] += 1
