"""The coordinator, plainly: see ``quorate.coordination.coordinator``."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from math import inf

from support.plain.dealing import Dealing, Work
from support.plain.members import Members, Task
from support.plain.open_steps import Kept, OpenStep, OpenSteps

from quorate.coordination import plan
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
        self._timeout_s = timeout_s
        self._members = Members()
        self._steps = OpenSteps(first_step, left_open)
        if home_shards is None:

            def home_shards(rank_of: tuple[int, int], step: int) -> range:
                return plan.home_shards(rank_of, shards_of(step))

        self._dealing = Dealing(
            Work(shards_of, home_shards, lookahead, end=last_step),
            self._steps,
            self._members,
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
        effects = list(self._take(event, now))
        return effects if rests else effects + self.go_on(now)

    def go_on(self, now: float) -> list[Effect]:
        """Return what comes next: shards for whoever is idle, an update, when to look again."""
        effects, look_at = list[Effect](), inf
        if self.phase is Phase.COMPUTING:
            effects += self._go_on(now)
            look_at = self._dealing.look_again_at
        if self.phase is not Phase.FINISHED:
            look_at = min(look_at, self._silence_at(now))
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
        return self._steps.left_open()

    @property
    def left_open_next(self) -> list[int]:
        """The same as it will be when the update under way is made."""
        return self._steps.left_open(once_applied=self._steps.applying)

    def usual_s(self, worker: int) -> float | None:
        """Return how long a shard usually takes there, in seconds; None before it is known."""
        member = self._members.get(worker)
        return None if member is None else member.usual_s

    # --- events -----------------------------------------------------------------------------------

    def _take(self, event: Event, now: float) -> Iterable[Effect]:
        match event:
            case Joined(worker, place):
                self._join(worker, place, now)
            case Left():
                return self._leave(event)
            case Done(worker, step, shard):
                task = self._end_task(worker, step, shard)
                self._members[worker].learn((now - task.since) / task.count)
                return self._done(task, worker)
            case Failed(worker, step, shard):
                return self._failed(self._end_task(worker, step, shard), worker, shard)
            case Cancelled(worker, step, shard):
                task = self._end_task(worker, step, shard)
                if not task.is_lost:
                    raise self._error(f"worker {worker} left off what it was not told to")
                # A lower bound: else one that is always too late would seem as fast as ever.
                took_s = (now - task.since) / task.count
                if took_s > self._members.expected_s(worker):
                    self._members[worker].learn(took_s)
            case Applied(step):
                return self._end_step(step)
            case Stop(reason):
                self._stop(reason)
            case Tick():
                # Only when nothing else is waiting to be handled: a result may be under way.
                return self._replace_silent(now)
        return []

    def _join(self, worker: int, place: str, now: float) -> None:
        if worker in self._members:
            raise self._error(f"worker {worker} joined twice")
        self.begun_at = now if self.begun_at is None else self.begun_at
        self._members.join(worker, place)
        self._steps.forget_homes()

    def _leave(self, event: Left) -> list[Effect]:
        worker = event.worker
        if worker not in self._members:
            raise self._error(f"worker {worker} left and had not joined")
        task = self._members.leave(worker)
        self._steps.forget_homes()
        for step in self._steps:
            lost = {*task.shards} if task is not None and task.step == step.number else set[int]()
            if not event.results_stay:
                lost |= {shard for shard, kept in step.kept.items() if kept.worker == worker}
                self._lose_results(step, worker)
            computed = self._members.computing(step.number).keys()
            step.todo = set(range(step.shards)) - step.kept.keys() - computed
            step.lost_with |= dict.fromkeys(lost & step.todo, worker)
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
        lost = [shard for shard, kept in step.kept.items() if kept.worker == worker]
        for shard in lost:
            del step.kept[shard]
        if lost and step.number == self._steps.applying and self.phase is Phase.APPLYING:
            # Nothing was applied: the sums went with the worker.
            self.phase, self._steps.applying = Phase.COMPUTING, None

    def _end_task(self, worker: int, step: int, shard: int) -> Task:
        member = self._members.get(worker)
        task = member.task if member is not None else None
        if member is None or task is None or task.step != step or shard not in task.shards:
            raise self._error(f"worker {worker} was not computing step {step}, shard {shard}")
        member.task = None
        return task

    def _done(self, task: Task, worker: int) -> list[Effect]:
        step = self._steps.expecting(task)
        if step is None:
            self._lose(task, worker, task.shards)
            return [Discard(worker, task.step, task.shard, task.count)]
        late = [shard for shard in task.shards if shard in step.kept]  # others were first
        step.kept |= dict.fromkeys(task.shards - step.kept.keys(), Kept(worker, task.version))
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
            step = self._steps[task.step]
            for shard in shards:
                self.tally.lost(worker, dropped=shard not in step.kept)

    def _failed(self, task: Task, worker: int, shard: int) -> list[Effect]:
        step = self._steps.expecting(task)
        if step is None:
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
        step.todo |= (
            set(task.shards) - step.kept.keys() - self._members.computing(step.number).keys()
        )

    def _abort(self, step: int, shard: int, worker: int) -> Abort:
        self.phase = Phase.FINISHED
        return Abort(worker, step, shard)

    def _end_step(self, number: int) -> Iterator[Effect]:
        if self.phase is not Phase.APPLYING or number != self._steps.applying:
            raise self._error(f"no update of step {number} was asked for")
        step = self._steps[number]
        for kept, shards in Counter(step.kept.values()).items():
            self.tally.applied(kept.worker, self.applied - kept.version, shards)
        for worker, task in self._members.tasks(number):
            self._lose(task, worker, task.shards)
            yield Cancel(worker, number, task.shard)
        self._steps.close(number)
        self.phase = Phase.COMPUTING

    def _stop(self, reason: str) -> None:
        self._steps.give_back_untouched()
        last = self.applied + len(self._steps)
        if last < self._last_step:
            self._last_step, self.reason = last, reason

    # --- what comes next --------------------------------------------------------------------------

    def _go_on(self, now: float) -> Iterator[Effect]:
        if self.applied >= self._last_step:
            self.phase = Phase.FINISHED
            yield Finish(self.applied, self.reason)
            return
        # Whoever can go on does so while the update is made.
        yield from self._dealing.deal(now, self._last_step)
        if (step := self._next_to_apply()) is not None:
            self.phase, self._steps.applying = Phase.APPLYING, step.number
            yield Apply(
                step.number,
                tuple(sorted({kept.worker for kept in step.kept.values()})),
                shards=tuple(sorted(step.kept)),
                staleness=self.applied - min([kept.version for kept in step.kept.values()]),
            )

    def _next_to_apply(self) -> OpenStep | None:
        """Return the ready step with the oldest parameters that leaves the others time."""
        ready = [step for step in self._steps if step.is_ready]
        if len(ready) == len(self._steps) <= 1:
            return ready[0] if ready else None
        return next(filter(self._leaves_time, sorted(ready, key=self._version)), None)

    def _version(self, step: OpenStep) -> int:
        """Return the oldest version that a gradient of the step is from, or will be."""
        kept = [result.version for result in step.kept.values()]
        running = [task.version for _, task in self._members.tasks(step.number)]
        # Nobody has anything of it: if it is dealt at once, it is from after the next update.
        return min([*kept, *running], default=self.applied + 1)

    def _leaves_time(self, step: OpenStep) -> bool:
        """Return whether, after this step, the others can all be applied before they are stale.

        They can if they can in the order of their versions: earliest deadline first. A step that
        is ready may have to wait for one that is not, though nobody knows when that will be. It is
        no deadlock: a worker that leaves makes the step it had as fresh as can be, and the oldest
        step alone always leaves the others time, as no more are open than the rule bears.
        """
        if len(self._steps) == 1 or self._rule.staleness == inf:
            return True
        others = sorted(self._version(other) for other in self._steps if other is not step)
        applied = self.applied + 1
        return all(
            applied + later - version <= self._rule.staleness
            for later, version in enumerate(others)
        )

    # --- silence ----------------------------------------------------------------------------------

    def _silence_at(self, now: float) -> float:
        """Return when the next worker will have been silent for too long."""
        if self._timeout_s is None:
            return inf
        # One that is due already waits for a Tick.
        return max(now, min((at for at, _ in self._members.silent(self._timeout_s)), default=inf))

    def _replace_silent(self, now: float) -> Iterator[Replace]:
        if self._timeout_s is None:
            return
        for at, worker in self._members.silent(self._timeout_s):
            member = self._members[worker]
            if member.task is not None and at <= now:
                member.is_replaced = True
                yield Replace(worker, f"no answer for {now - member.task.since:.0f} s")

    def _error(self, message: str) -> ProtocolError:
        return ProtocolError(
            f"{message} (after {self.applied} updates, {self.phase.value})", self._trail
        )
