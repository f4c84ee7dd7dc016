"""The coordinator's decisions: a pure state machine. Events and the time go in, effects come out.

No torch, socket, thread or clock is in here. Whoever drives it (see ``drive``) carries out the
effects in their order and reports what happened as events. So every order of events can be tried,
and a thousand workers be simulated in a loop.

A step is open from its first shard that is dealt until its update is made. The rule says how many
steps may be open: one, or as many as can be applied before the oldest becomes too stale. The shards
of a step are dealt to workers one at a time. Each worker has home shards, so that its rows can be
fetched ahead and its sums merge into few vectors. An idle worker takes a shard that nobody has
begun, and when there is none, a copy of one whose worker is far behind its usual time, or is
usually so slow that the idle one will be done before it. The first copy that is done is kept and
the other discarded. When enough shards of a step are kept, its update is applied; who computes a
shard of it that is not in is told to leave off.

A worker that has been silent for too long is replaced. A shard that fails, or takes its worker with
it, is tried on another worker, and then ends the run.

    computing --(a step is ready)--> applying --(Applied)--> computing ... --> finished
        ^                               |
        +-----(a holder left: its shards are dealt again)

Legend: V shards of a step, N workers, t step, s shard, w worker, d how many updates were made when
a shard was dealt: the version of the parameters that it is computed from. Times are in seconds of
one monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from statistics import median
from typing import NamedTuple

from quorate.coordination import plan
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

# --- state ----------------------------------------------------------------------------------------


class Phase(Enum):
    COMPUTING = "computing"
    APPLYING = "applying"
    FINISHED = "finished"


class _Kept(NamedTuple):
    worker: int  # who holds it
    version: int


@dataclass
class _Step:
    """A step that is open."""

    number: int
    shards: int
    needed: int  # of them
    begun_at: float
    todo: set[int]  # nobody computes or holds them
    kept: dict[int, _Kept] = field(default_factory=dict)  # by shard
    failures: dict[int, list[int]] = field(default_factory=dict)  # shard -> workers it failed on
    homes: dict[int, range] = field(default_factory=dict)  # by worker, while the present ones stay

    @property
    def is_ready(self) -> bool:
        return len(self.kept) >= self.needed


@dataclass
class _Task:
    step: int
    shard: int
    version: int
    since: float
    is_cancelled: bool = False


@dataclass
class _Member:
    task: _Task | None = None
    rank_of: tuple[int, int] = (0, 1)  # (rank, number of workers)
    is_replaced: bool = False
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=15))  # of its last shards
    usual_s: float | None = None  # their median


@dataclass(frozen=True)
class _Run:
    """A shard that is being computed, by one worker or by two."""

    step: int
    shard: int
    workers: tuple[int, ...]
    behind_at: float  # when the first of them is far behind
    done_at: float  # when the first will be done, if it takes as long as usual

    def expected_at(self, now: float) -> float:
        """When it will be in; infinite if it is far behind, and nobody can tell."""
        return self.done_at if self.behind_at > now else inf


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
    ) -> None:
        self.first_step = self.applied = first_step
        self.begun_at: float | None = None  # when the first worker joined
        self.phase = Phase.COMPUTING
        self.tally = tally or Tally()
        self.reason = "all steps are done"  # why the run ends where it ends
        self._shards_of = shards_of
        self._home_shards = home_shards or (
            lambda rank_of, step: plan.home_shards(rank_of, shards_of(step))
        )
        self._lookahead = lookahead
        self._most_open = most_open
        self._last_step = last_step  # how many updates at the end
        self._beyond = last_step  # no step from this number on
        self._rule = rule
        self._patience = patience
        self._attempts = attempts
        self._timeout_s = timeout_s
        self._members: dict[int, _Member] = {}  # in order
        self._open: dict[int, _Step] = {}  # by number, in the order in which they were begun
        # Steps that nobody has begun: those left open or skipped, in order, and all from _top on.
        self._skipped = sorted(left_open)
        self._top = first_step + len(self._skipped)
        self._applying: int | None = None
        self._trail: deque[Event] = deque(maxlen=20)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take an event that happened at time ``now``.

        Raises:
            ProtocolError: the event contradicts what went before; it carries the last events.
        """
        self._trail.append(event)
        self._look_at = inf  # when someone will be far behind whom an idle worker could help
        effects: list[Effect] = []
        match event:
            case Joined(worker):
                if worker in self._members:
                    raise self._error(f"worker {worker} joined twice")
                self.begun_at = now if self.begun_at is None else self.begun_at
                self._members[worker] = _Member()
                self._members = dict(sorted(self._members.items()))
                self._assign_places()
            case Left():
                effects += self._leave(event)
            case Done(worker, step, shard):
                task = self._end_task(worker, step, shard)
                self._learn(worker, now - task.since)
                effects.append(self._done(task, worker))
            case Failed(worker, step, shard):
                effects += self._failed(self._end_task(worker, step, shard), worker)
            case Cancelled(worker, step, shard):
                task = self._end_task(worker, step, shard)
                if not task.is_cancelled:
                    raise self._error(f"worker {worker} left off what it was not told to")
                # A lower bound: else one that is always too late would seem as fast as ever.
                if now - task.since > self._expected_s(self._members[worker]):
                    self._learn(worker, now - task.since)
            case Applied(step):
                effects += self._end_step(step)
            case Stop(reason):
                self._stop(reason)
            case Tick():
                # Only when nothing else is waiting to be handled: a result may be under way.
                effects += self._replace_silent(now)
        if self.phase is Phase.COMPUTING:
            effects += self._go_on(now)
        if self.phase is not Phase.FINISHED:
            look_at = min(self._look_at, self._silence_at(now))
            if look_at < inf:
                effects.append(Wake(look_at))
        return effects

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers that have joined and not left, in order."""
        return tuple(self._members)

    @property
    def left_open(self) -> list[int]:
        """Steps that are not applied, though later ones are; none where the order is kept."""
        return self._passed_over(self._open.keys())

    @property
    def left_open_next(self) -> list[int]:
        """The same as it will be when the update under way is made."""
        return self._passed_over(self._open.keys() - {self._applying})

    def _passed_over(self, begun: Iterable[int]) -> list[int]:
        end = self._top
        steps = sorted([*self._skipped, *begun])
        while steps and steps[-1] == end - 1:
            end -= 1
            steps.pop()
        return steps

    # --- events -----------------------------------------------------------------------------------

    def _assign_places(self) -> None:
        for rank, member in enumerate(self._members.values()):
            member.rank_of = (rank, len(self._members))
        for step in self._open.values():
            step.homes.clear()

    def _leave(self, event: Left) -> list[Effect]:
        worker = event.worker
        if worker not in self._members:
            raise self._error(f"worker {worker} left and had not joined")
        task = self._members.pop(worker).task
        self._assign_places()
        for step in self._open.values():
            if not event.results_stay:
                lost = [shard for shard, kept in step.kept.items() if kept.worker == worker]
                for shard in lost:
                    del step.kept[shard]
                if lost and step.number == self._applying and self.phase is Phase.APPLYING:
                    # Nothing was applied: the sums went with the worker.
                    self.phase, self._applying = Phase.COMPUTING, None
            step.todo = set(range(step.shards)) - step.kept.keys() - self._running(step).keys()
        wanting = self._wanting(task) if task is not None else None
        if event.crashed and task is not None and wanting is not None:
            failed_on = wanting.failures.setdefault(task.shard, [])
            failed_on.append(worker)
            if len(failed_on) >= self._attempts:
                self.phase = Phase.FINISHED
                return [Abort(worker, task.step, task.shard)]
        return []

    def _wanting(self, task: _Task) -> _Step | None:
        """The step that a task's result may still be in."""
        step = self._open.get(task.step)
        if step is None or step.number == self._applying or task.shard in step.kept:
            return None
        return step

    def _end_task(self, worker: int, step: int, shard: int) -> _Task:
        member = self._members.get(worker)
        task = member.task if member is not None else None
        if member is None or task is None or (task.step, task.shard) != (step, shard):
            raise self._error(f"worker {worker} was not computing step {step}, shard {shard}")
        member.task = None
        return task

    def _learn(self, worker: int, seconds: float) -> None:
        member = self._members[worker]
        member.times_s.append(seconds)
        member.usual_s = median(member.times_s)

    def _expected_s(self, member: _Member) -> float:
        """How long a shard takes there: measured by the others' before one is done."""
        if member.usual_s is not None:
            return member.usual_s
        known = [m.usual_s for m in self._members.values() if m.usual_s is not None]
        return median(known) if known else inf

    def _done(self, task: _Task, worker: int) -> Effect:
        step = self._wanting(task)
        if step is None:
            self._lose(task, worker)
            return Discard(worker, task.step, task.shard)
        step.kept[task.shard] = _Kept(worker, task.version)
        return Keep(worker, task.step, task.shard)

    def _lose(self, task: _Task, worker: int) -> None:
        """Count a shard whose result is not wanted, once."""
        if not task.is_cancelled:
            task.is_cancelled = True
            step = self._open[task.step]
            self.tally.lost(worker, dropped=task.shard not in step.kept)

    def _failed(self, task: _Task, worker: int) -> list[Effect]:
        step = self._wanting(task)
        if step is None:
            return []  # a copy that nobody needs any more
        failed_on = step.failures.setdefault(task.shard, [])
        failed_on.append(worker)
        if task.shard not in self._running(step):
            step.todo.add(task.shard)
        if len(set(failed_on)) >= self._attempts or self._members.keys() <= set(failed_on):
            self.phase = Phase.FINISHED
            return [Abort(worker, task.step, task.shard)]
        return []

    def _end_step(self, number: int) -> Iterator[Effect]:
        if self.phase is not Phase.APPLYING or number != self._applying:
            raise self._error(f"no update of step {number} was asked for")
        step = self._open[number]
        for kept in step.kept.values():
            self.tally.applied(kept.worker, self.applied - kept.version)
        for worker, member in self._members.items():
            if member.task is not None and member.task.step == number:
                self._lose(member.task, worker)
                yield Cancel(worker, number, member.task.shard)
        del self._open[number]
        self.applied += 1
        self.phase, self._applying = Phase.COMPUTING, None

    def _stop(self, reason: str) -> None:
        for step in [s for s in self._open.values() if len(s.todo) == s.shards]:
            del self._open[step.number]
            self._skipped = sorted([*self._skipped, step.number])
        last = self.applied + len(self._open)
        if last < self._last_step:
            self._last_step, self.reason = last, reason

    # --- what comes next --------------------------------------------------------------------------

    def _go_on(self, now: float) -> Iterator[Effect]:
        if self.applied >= self._last_step:
            self.phase = Phase.FINISHED
            yield Finish(self.applied, self.reason)
            return
        # Whoever can go on does so while the update is made.
        yield from self._deal(now)
        if (step := self._next_to_apply()) is not None:
            self.phase, self._applying = Phase.APPLYING, step.number
            yield Apply(
                step.number,
                tuple(sorted({kept.worker for kept in step.kept.values()})),
                shards=tuple(sorted(step.kept)),
                staleness=max(self.applied - kept.version for kept in step.kept.values()),
            )

    def _next_to_apply(self) -> _Step | None:
        """The ready step with the oldest parameters, unless another would become too stale."""
        ready = [step for step in self._open.values() if step.is_ready]
        return next(filter(self._leaves_time, sorted(ready, key=self._version)), None)

    def _version(self, step: _Step) -> int:
        """Of the oldest parameters that a gradient of the step is from, or will be."""
        kept = [each.version for each in step.kept.values()]
        running = [
            m.task.version
            for m in self._members.values()
            if m.task is not None and m.task.step == step.number
        ]
        return min([*kept, *running], default=self.applied + 1)

    def _leaves_time(self, step: _Step) -> bool:
        """Whether, after this step, the other open ones can all be applied before they are stale.

        They can if they can in the order of their versions: earliest deadline first.
        """
        if len(self._open) == 1 or self._rule.staleness == inf:
            return True
        others = sorted(self._version(other) for other in self._open.values() if other is not step)
        applied = self.applied + 1
        return all(
            applied + later - version <= self._rule.staleness
            for later, version in enumerate(others)
        )

    # --- dealing ----------------------------------------------------------------------------------

    def _deal(self, now: float) -> Iterator[Effect]:
        # 1. Shards that nobody has begun.
        for worker in self._idle():
            if not self._may_begin() and not any(s.todo for s in self._open.values()):
                break
            if (choice := self._next_shard(worker, now)) is not None:
                yield self._give(worker, *choice, now)
        # 2. Copies of those that are far behind or slow.
        idle = self._idle() if self._rule.copies else []
        if not idle:
            return
        runs = [run for step in self._open.values() for run in self._worth_copying(step, now)]
        runs.sort(key=lambda run: run.behind_at)
        last_to_be_done = sorted(runs, key=lambda run: -run.done_at)
        for worker in idle if runs else ():
            if (copy := self._next_copy(worker, runs, last_to_be_done, now)) is not None:
                run, reason = copy
                runs.remove(run)
                last_to_be_done.remove(run)
                step = self._open[run.step]
                yield self._give(worker, step, run.shard, reason, now, instead_of=run.workers[0])
        # 3. Another look when the next one is.
        if self._idle():
            self._look_at = min((run.behind_at for run in runs if run.behind_at > now), default=inf)

    def _idle(self) -> list[int]:
        return [w for w, m in self._members.items() if m.task is None and not m.is_replaced]

    def usual_s(self, worker: int) -> float | None:
        """How long a shard usually takes there, in seconds; None before it is known."""
        member = self._members.get(worker)
        return None if member is None else member.usual_s

    def _give(
        self,
        worker: int,
        step: _Step,
        shard: int,
        reason: str,
        now: float,
        instead_of: int | None = None,
    ) -> Compute:
        step.todo.discard(shard)
        member = self._members[worker]
        member.task = _Task(step.number, shard, self.applied, now)
        return Compute(worker, step.number, shard, reason, member.rank_of, instead_of)

    def _next_shard(self, worker: int, now: float) -> tuple[_Step, int, str] | None:
        """Which of the shards that nobody has begun an idle worker computes, and why."""
        for step in self._open.values():
            if (choice := self._shard_of(step, worker, now)) is not None:
                return step, *choice
        if not self._may_begin():
            return None
        step = self._begin(worker, now)
        choice = self._shard_of(step, worker, now)
        assert choice is not None
        return step, *choice

    def _shard_of(self, step: _Step, worker: int, now: float) -> tuple[int, str] | None:
        todo = {shard for shard in step.todo if self._may_try(step, worker, shard)}
        if not todo or not self._is_of_use(step, worker, now):
            return None
        if not step.homes:
            step.homes = {
                w: self._home_shards(m.rank_of, step.number) for w, m in self._members.items()
            }
        own = todo.intersection(step.homes[worker])
        if own:
            return min(own), "home shard"
        # From the end of the longest run that is left, so that its owner's run stays whole.
        longest = max((todo.intersection(home) for home in step.homes.values()), key=len)
        return max(longest or todo), "nobody has begun it"

    def _is_of_use(self, step: _Step, worker: int, now: float) -> bool:
        """Whether the step may need one more shard than are kept and being computed.

        It does at its beginning, when nobody knows who will be late. Later, to begin one more than
        is needed would be in vain, and make the worker late for the next step.
        """
        wanted = step.needed - len(step.kept)
        if wanted <= 0:
            return False
        if step.needed == step.shards or step.begun_at == now:
            return True
        runs, own_s = self._runs(step), self._members[worker].usual_s
        if len(runs) < wanted or own_s is None:
            return True
        # Whoever was told to leave off is back a little after the others have begun.
        if now <= step.begun_at + (self._patience - 1) * own_s:
            return True
        return now + own_s <= sorted(run.expected_at(now) for run in runs)[wanted - 1]

    def _may_begin(self) -> bool:
        """Whether one more step may be opened.

        With so many open, the last one to be applied is still fresh enough, whichever it is. A
        worker that is alone would only make its own gradients stale.
        """
        most = min(self._rule.staleness + 1, self._most_open) if len(self._members) > 1 else 1
        return len(self._open) < most and self.applied + len(self._open) < self._last_step

    def _begin(self, worker: int, now: float) -> _Step:
        """Open the next step, or one a little later that is the worker's at home."""
        first = self._skipped[0] if self._skipped else self._top
        end = min(max(first + self._lookahead, self._top), self._beyond)
        rank_of = self._members[worker].rank_of
        number = next(
            (
                step
                for step in [*self._skipped, *range(self._top, end)]
                if step < first + self._lookahead and self._home_shards(rank_of, step)
            ),
            first,
        )
        if number < self._top:
            self._skipped.remove(number)
        else:
            self._skipped += range(self._top, number)
            self._top = number + 1
        shards = self._shards_of(number)
        step = _Step(number, shards, self._rule.needed(shards), now, todo=set(range(shards)))
        self._open[number] = step
        return step

    def _may_try(self, step: _Step, worker: int, shard: int) -> bool:
        """Whether the shard has not failed on this worker, or there is nobody else to try it."""
        failed_on = step.failures.get(shard)
        return (
            failed_on is None or worker not in failed_on or self._members.keys() <= set(failed_on)
        )

    def _running(self, step: _Step) -> dict[int, list[int]]:
        """Shards of a step that are being computed, with the workers on each."""
        running: dict[int, list[int]] = {}
        for worker, member in self._members.items():
            if member.task is not None and member.task.step == step.number:
                running.setdefault(member.task.shard, []).append(worker)
        return running

    def _next_copy(
        self, worker: int, runs: list[_Run], last_to_be_done: list[_Run], now: float
    ) -> tuple[_Run, str] | None:
        """Which of the shards that others compute an idle worker had better compute too, and why.

        First the one that is furthest behind its worker's usual time; else the one that would be
        done last, if this worker will be done clearly before it.
        """
        for run in runs:
            if run.behind_at > now:
                break
            if worker not in self._open[run.step].failures.get(run.shard, ()):
                return run, f"worker {run.workers[0]} is far behind its usual time"
        own_s = self._members[worker].usual_s
        if own_s is None:
            return None
        for run in last_to_be_done:
            if run.done_at <= now + self._patience * own_s:
                break
            if worker not in self._open[run.step].failures.get(run.shard, ()):
                return run, f"worker {run.workers[0]} is slow"
        return None

    def _runs(self, step: _Step) -> list[_Run]:
        """The shards of a step that are being computed and that nobody holds.

        A worker without a time of its own is measured by the others'; before one is known, nobody
        is behind.
        """
        known = [m.usual_s for m in self._members.values() if m.usual_s is not None]
        of_all_s = median(known) if known else inf
        found = []
        for shard, runners in self._running(step).items():
            if shard in step.kept:
                continue  # the loser of two copies may still be running
            began = []
            for worker in runners:
                member = self._members[worker]
                assert member.task is not None
                usual_s = of_all_s if member.usual_s is None else member.usual_s
                began.append((member.task.since, usual_s))
            found.append(
                _Run(
                    step.number,
                    shard,
                    tuple(runners),
                    behind_at=min(since + self._patience * usual_s for since, usual_s in began),
                    done_at=min(since + usual_s for since, usual_s in began),
                )
            )
        return found

    def _worth_copying(self, step: _Step, now: float) -> list[_Run]:
        """Those that one worker alone computes, and that the step cannot do without."""
        runs = self._runs(step)
        wanted = step.needed - len(step.kept)
        if wanted < len(runs):  # the quorum does not wait for the others
            runs = sorted(runs, key=lambda run: run.expected_at(now))[: max(0, wanted)]
        return [run for run in runs if len(run.workers) == 1]

    # --- silence ----------------------------------------------------------------------------------

    def _silent_at(self, member: _Member) -> float:
        """When a worker has been silent for too long."""
        if self._timeout_s is None or member.task is None or member.is_replaced:
            return inf
        usual_s = member.usual_s or 0.0
        return member.task.since + max(self._timeout_s, 3 * usual_s)

    def _silence_at(self, now: float) -> float:
        """When the next of them will have been."""
        if self._timeout_s is None:
            return inf
        # One that is due already waits for a Tick.
        return max(now, min(map(self._silent_at, self._members.values()), default=inf))

    def _replace_silent(self, now: float) -> Iterator[Replace]:
        for worker, member in self._members.items():
            if member.task is not None and self._silent_at(member) <= now:
                member.is_replaced = True
                yield Replace(worker, f"no answer for {now - member.task.since:.0f} s")

    def _error(self, message: str) -> ProtocolError:
        return ProtocolError(
            f"{message} (after {self.applied} updates, {self.phase.value})", self._trail
        )
