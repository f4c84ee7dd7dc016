"""The coordinator's decisions: a pure state machine. Events and the time go in, effects come out.

No torch, socket, thread or clock is in here. Whoever drives it (see ``training/drive.py``) carries
out the effects in their order and reports what happened as events. So every order of events can be
tried, and a thousand workers be simulated in a loop.

A step is open from its first shard that is dealt until its update is made (``open_steps.py``). The
rule says how many steps may be open: one, or as many as can be applied before the oldest becomes
too stale. Idle workers are given shards, and copies of shards (``dealing.py``). When enough shards
of a step are kept, its update is applied; who computes a shard of it that is not in is told to
leave off.

A worker that has been silent for too long is replaced. A shard that fails, or takes its worker with
it, is tried on another worker, and then ends the run.

    computing --(a step is ready)--> applying --(Applied)--> computing ... --> finished
        ^                               |
        +-----(a holder left: its shards are dealt again)

Legend: V shards of a step, N workers, t step, s shard, w worker; a version is how many updates were
made when a shard was dealt: that of the parameters it is computed from. Times are in seconds of one
monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from math import inf

from quorate.coordination import plan
from quorate.coordination.dealing import Dealing, Work
from quorate.coordination.members import Members, Task
from quorate.coordination.open_steps import OpenStep, OpenSteps
from quorate.coordination.protocol import (
    Abort,
    Applied,
    Apply,
    Cancel,
    Cancelled,
    Discard,
    Done,
    Effect,
    Event,
    Failed,
    Finish,
    Joined,
    Keep,
    Left,
    Replace,
    Stop,
    Tick,
    Wake,
)
from quorate.coordination.rules import Rule
from quorate.coordination.running import Running
from quorate.coordination.tally import Tally
from quorate.errors import ProtocolError


class Phase(Enum):
    """Where the coordinator is."""

    COMPUTING = "computing"
    APPLYING = "applying"
    FINISHED = "finished"


class Coordinator:
    """Says who computes what until ``last_step`` updates are made.

    Args:
        shards_of: V of a step, a pure function.
        first_step: updates applied so far.
        last_step: updates applied at the end.
        rule: what makes an update.
        home_shards: from (rank, number of workers) and a step to the worker's home shards, pure.
        next_home: see ``dealing.Work``. Default: one step after the other is looked at.
        lookahead: of so many steps, from the next one on, a worker begins one of its home first.
        left_open: steps begun before the first ``first_step`` updates were all made, and not in
            them.
        most_open: how many steps may be open under any rule; bounds the memory for results.
        tally: goes on with these counts.
        patience: a shard is far behind when it has taken this many times the usual time of its
            worker. Lower it if stragglers are short and idle workers cheap.
        attempts: how often a shard may fail before the run is stopped.
        timeout_s: a worker that computes one shard for so long, and for 3 times its usual time, is
            replaced. None: never.
        run_s: how long a run of shards may usually take that a worker is given at once; 0 where
            workers take single ones.
    """

    def __init__(
        self,
        *,
        shards_of: Callable[[int], int],
        first_step: int,
        last_step: int,
        rule: Rule,
        home_shards: Callable[[tuple[int, int], int], range] | None = None,
        next_home: Callable[[tuple[int, int], int, int], int] | None = None,
        lookahead: int = 1,
        left_open: Iterable[int] = (),
        most_open: float = inf,
        tally: Tally | None = None,
        patience: float = 1.5,
        attempts: int = 2,
        timeout_s: float | None = None,
        run_s: float = 0.0,
    ) -> None:
        self.first_step = first_step
        self.begun_at: float | None = None  # when the first worker joined
        self.phase = Phase.COMPUTING
        self.tally = tally or Tally()
        self.reason = "all steps are done"  # why the run ends where it ends
        self._last_step = last_step  # how many updates at the end
        self._rule = rule
        self._attempts = attempts
        self._members = Members(timeout_s)
        running = Running(self._members, patience)
        self._steps = OpenSteps(first_step, left_open, running, rule.staleness)
        homes = home_shards or (lambda rank_of, step: plan.home_shards(rank_of, shards_of(step)))
        next_homes = next_home or partial(plan.next_home, homes)
        self._dealing = Dealing(
            Work(shards_of, homes, next_homes, lookahead, end=last_step),
            self._steps,
            self._members,
            running,
            rule,
            most_open=most_open,
            patience=patience,
            run_s=run_s,
        )
        self._trail: deque[Event] = deque(maxlen=20)

    def handle(self, event: Event, now: float, *, rests: bool = False) -> list[Effect]:
        """Take an event that happened at time ``now``, and return what to do, in order.

        Args:
            rests: nothing is begun before ``go_on`` is called: there may be a stop by then.

        Raises:
            ProtocolError: the event contradicts what went before; it carries the last events.
        """
        self._trail.append(event)
        effects = self._take(event, now)
        return effects if rests else effects + self.go_on(now)

    def go_on(self, now: float) -> list[Effect]:
        """Return what comes next: shards for whoever is idle, an update, when to look again."""
        effects: list[Effect] = []
        look_at = inf
        if self.phase is Phase.COMPUTING:
            effects += self._go_on(now)
            look_at = self._dealing.look_again_at
        if self.phase is not Phase.FINISHED:
            # One that is due already waits for a Tick.
            look_at = min(look_at, max(now, self._members.silent_at))
            if look_at < inf:
                effects.append(Wake(look_at))
        return effects

    @property
    def applied(self) -> int:
        """How many updates are made, those before ``first_step`` among them."""
        return self._steps.applied

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers that have joined and not left, in order."""
        return self._members.numbers

    @property
    def left_open(self) -> list[int]:
        """Steps that are not applied, though later ones are; none where the order is kept."""
        return self._steps.left_open

    def usual_s(self, worker: int) -> float | None:
        """Return how long a shard usually takes there, in seconds; None before it is known."""
        member = self._members.by_number.get(worker)
        return None if member is None else member.usual_s

    # --- events -----------------------------------------------------------------------------------

    def _take(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Done(worker, step, shard):
                task = self._task(worker, step, shard)
                self._members.learn(worker, (now - task.since) / task.count)
                self._end(task)
                return self._done(task, worker)
            case Applied(step):
                return self._end_step(step)
            case Joined(worker, place):
                self._join(worker, place, now)
            case Left():
                return self._leave(event)
            case Failed(worker, step, shard):
                self._end(task := self._task(worker, step, shard))
                return self._failed(task, worker, shard)
            case Cancelled(worker, step, shard):
                self._end(task := self._task(worker, step, shard))
                if not task.is_lost:
                    raise self._error(f"worker {worker} left off what it was not told to")
                # A lower bound: else one that is always too late would seem as fast as ever.
                took_s = (now - task.since) / task.count
                if took_s > self._members.expected_s(worker):
                    self._members.learn(worker, took_s)
            case Stop(reason):
                self._stop(reason)
            case Tick():
                # Only when nothing else is waiting to be handled: a result may be under way.
                return self._replace_silent(now)
        return []

    def _join(self, worker: int, place: str, now: float) -> None:
        if worker in self._members.by_number:
            raise self._error(f"worker {worker} joined twice")
        self.begun_at = now if self.begun_at is None else self.begun_at
        self._members.join(worker, place)
        are_several = len(self._members.by_number) > 1
        if are_several and self._rule.copies and not self._steps.running.is_asked:
            self._steps.ask()

    def _leave(self, event: Left) -> list[Effect]:
        worker = event.worker
        if worker not in self._members.by_number:
            raise self._error(f"worker {worker} left and had not joined")
        task = self._members.leave(worker)
        if task is not None:
            self._steps.end(task)
        for step in self._steps.held_by(worker) if not event.results_stay else ():
            self._lose_results(step, worker)
        if task is not None:
            self._steps.put_back(task, is_lost=True)
        expecting = None if task is None else self._steps.expecting(task)
        if not event.crashed or task is None or expecting is None:
            return []
        # What it was computing may be to blame. Unlike an exception, the same worker may try it
        # again, under its old number, and each time counts. Which shard of a run it was shows when
        # they are dealt one by one.
        expecting.has_runs = expecting.has_runs and task.count == 1
        if task.count > 1:
            return []
        if len(expecting.note_failure(task.shard, worker)) >= self._attempts:
            return [self._abort(task.step, task.shard, worker)]
        return []

    def _lose_results(self, step: OpenStep, worker: int) -> None:
        """Forget what a worker held of a step."""
        is_lost = self._steps.lose(step, worker)
        if is_lost and step.number == self._steps.applying and self.phase is Phase.APPLYING:
            # Nothing was applied: the sums went with the worker.
            self.phase, self._steps.applying = Phase.COMPUTING, None

    def _task(self, worker: int, step: int, shard: int) -> Task:
        member = self._members.by_number.get(worker)
        task = member.task if member is not None else None
        if task is None or task.step != step or shard not in task.shards:
            raise self._error(f"worker {worker} was not computing step {step}, shard {shard}")
        return task

    def _end(self, task: Task) -> None:
        """Note that a worker has answered."""
        self._members.end(task.worker)
        self._steps.end(task)

    def _done(self, task: Task, worker: int) -> list[Effect]:
        step = self._steps.expecting(task)
        if step is None:
            self._lose(task, worker, task.shards)
            self._steps.put_back(task)  # to be dealt again, should the update come to nothing
            return [Discard(worker, task.step, task.shard, task.count)]
        late = list[int]()
        if step.kept:
            late = [shard for shard in task.shards if shard in step.kept]  # others were first
        wanted = [shard for shard in task.shards if shard not in late] if late else task.shards
        self._steps.keep(step, wanted, task)
        if not late:
            return [Keep(worker, task.step, task.shard, task.count)]
        self._lose(task, worker, late)
        return [
            (Discard if shard in late else Keep)(worker, task.step, shard) for shard in task.shards
        ]

    def _lose(self, task: Task, worker: int, shards: Iterable[int]) -> None:
        """Count shards of a task whose results are not wanted, once."""
        if not task.is_lost:
            task.is_lost = True
            step = self._steps.by_number[task.step]
            for shard in shards:
                self.tally.lost(worker, dropped=shard not in step.kept)

    def _failed(self, task: Task, worker: int, shard: int) -> list[Effect]:
        step = self._steps.expecting(task)
        if step is None:
            self._steps.put_back(task)  # to be dealt again, should the update come to nothing
            return []  # a copy that nobody needs any more
        self._give_back(step, task)
        if shard in step.kept:
            return []
        failed_on = step.note_failure(shard, worker)
        if len(set(failed_on)) >= self._attempts or self._members.are_among(failed_on):
            return [self._abort(task.step, shard, worker)]
        return []

    def _give_back(self, step: OpenStep, task: Task) -> None:
        """Have shards that were to be computed dealt again, those of a run one by one."""
        step.has_runs = step.has_runs and task.count == 1
        self._steps.put_back(task)

    def _abort(self, step: int, shard: int, worker: int) -> Abort:
        self.phase = Phase.FINISHED
        return Abort(worker, step, shard)

    def _end_step(self, number: int) -> list[Effect]:
        if self.phase is not Phase.APPLYING or number != self._steps.applying:
            raise self._error(f"no update of step {number} was asked for")
        step, effects = self._steps.by_number[number], list[Effect]()
        for kept, shards in step.results.items():
            self.tally.applied(kept.worker, self._steps.applied - kept.version, shards)
        for task in step.tasks if step.computing or step.copies else ():
            self._lose(task, task.worker, task.shards)
            effects.append(Cancel(task.worker, number, task.shard))
        self._steps.close(number)
        self.phase = Phase.COMPUTING
        return effects

    def _stop(self, reason: str) -> None:
        self._steps.give_back_untouched()
        last = self.applied + len(self._steps.by_number)
        if last < self._last_step:
            self._last_step, self.reason = last, reason

    # --- what comes next --------------------------------------------------------------------------

    def _go_on(self, now: float) -> list[Effect]:
        applied = self._steps.applied
        if applied >= self._last_step:
            self.phase = Phase.FINISHED
            return [Finish(applied, self.reason)]
        # Whoever can go on does so while the update is made.
        effects: list[Effect] = [*self._dealing.deal(now, self._last_step)]
        if self._steps.ready and (step := self._next_to_apply()) is not None:
            self.phase, self._steps.applying = Phase.APPLYING, step.number
            apply = Apply(
                step.number,
                tuple(sorted(step.held)),
                shards=tuple(sorted(step.kept)),
                staleness=applied - min([kept.version for kept in step.results]),
            )
            effects.append(apply)
        return effects

    def _next_to_apply(self) -> OpenStep | None:
        """Return the ready step with the oldest parameters, if it leaves the others time.

        If it does not, no other does: the older the step that is gone, the less are the others
        late. A step that is ready may have to wait for one that is not, though nobody knows when
        that will be. It is no deadlock: a worker that leaves makes the step it had as fresh as can
        be, and the oldest step alone always leaves the others time, as no more are open than the
        rule bears.
        """
        step = self._steps.oldest_ready()
        if step is None or not self._steps.leaves_time(step):
            return None
        return step

    # --- silence ----------------------------------------------------------------------------------

    def _replace_silent(self, now: float) -> list[Effect]:
        effects = list[Effect]()
        for worker, task in self._members.silent(now):
            self._members.replace(worker)
            effects.append(Replace(worker, f"no answer for {now - task.since:.0f} s"))
        return effects

    def _error(self, message: str) -> ProtocolError:
        return ProtocolError(
            f"{message} (after {self.applied} updates, {self.phase.value})", self._trail
        )
