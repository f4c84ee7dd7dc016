"""The coordinator's decisions: a pure state machine. Events and the time go in, effects come out.

No torch, socket, thread or clock is in here. Whoever drives it (see ``drive``) carries out the
effects in their order and reports what happened as events. So every order of events can be tried,
and a thousand workers be simulated in a loop.

A step: its shards are dealt to workers one at a time. Each worker has home shards, a contiguous
run, so that its sums merge into few vectors. An idle worker takes a shard that nobody has begun,
and when there is none, a copy of one whose worker is far behind its usual time. The first copy that
is done is kept and the other discarded; the bits are the same. When enough shards are kept, the
update is applied, and the next step begins.

    computing --(enough shards kept)--> applying --(Applied)--> computing ... --> finished
        ^                                  |
        +------(a holder left: its shards are dealt again)------+

Legend: V shards of a step, N workers, t step, s shard, w worker. Times are in seconds of one
monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from statistics import median

from quorate.errors import ProtocolError
from quorate.rules import Rule

# --- events: what happened ------------------------------------------------------------------------


@dataclass(frozen=True)
class Joined:
    """Worker w is ready to compute."""

    worker: int


@dataclass(frozen=True)
class Left:
    """Worker w is gone, and with it whatever it had computed of the current step."""

    worker: int
    reason: str


@dataclass(frozen=True)
class Done:
    """Worker w has computed shard s of step t and holds the result."""

    worker: int
    step: int
    shard: int


@dataclass(frozen=True)
class Failed:
    """User code raised on worker w in shard s of step t; the worker lives."""

    worker: int
    step: int
    shard: int


@dataclass(frozen=True)
class Applied:
    """The update of step t is done."""

    step: int


@dataclass(frozen=True)
class Stop:
    """Finish the step under way, then end."""

    reason: str


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = Joined | Left | Done | Failed | Applied | Stop | Tick

# --- effects: what to do --------------------------------------------------------------------------


@dataclass(frozen=True)
class Compute:
    """Have worker w compute shard s of step t; the reason is for people."""

    worker: int
    step: int
    shard: int
    reason: str


@dataclass(frozen=True)
class Keep:
    """Worker w's result for shard s counts: add it to what w holds of step t."""

    worker: int
    step: int
    shard: int


@dataclass(frozen=True)
class Discard:
    """Worker w's result for shard s does not count: another was first."""

    worker: int
    step: int
    shard: int


@dataclass(frozen=True)
class Apply:
    """Collect what the holders hold of step t and apply the update; then report ``Applied``."""

    step: int
    holders: tuple[int, ...]


@dataclass(frozen=True)
class Wake:
    """Send a ``Tick`` at this time, unless something happens earlier."""

    at: float


@dataclass(frozen=True)
class Abort:
    """Shard s of step t failed beyond repair, last on worker w: stop and report its error."""

    worker: int
    step: int
    shard: int


@dataclass(frozen=True)
class Finish:
    """The run is over after ``step`` updates."""

    step: int
    reason: str


Effect = Compute | Keep | Discard | Apply | Wake | Abort | Finish


# --- state ----------------------------------------------------------------------------------------


class Phase(Enum):
    COMPUTING = "computing"
    APPLYING = "applying"
    FINISHED = "finished"


@dataclass
class _Task:
    step: int
    shard: int
    since: float


@dataclass
class _Member:
    task: _Task | None = None
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=15))  # of its last shards
    usual_s: float | None = None  # their median


class Coordinator:
    """Plans steps ``first_step`` to ``last_step`` - 1 and says who computes what.

    Args:
        shards_of: V of a step, a pure function.
        first_step: updates applied so far.
        last_step: updates applied at the end.
        rule: how many shards make an update.
        patience: a shard is far behind when it has taken this many times the usual time of its
            worker. Lower it if stragglers are short and idle workers cheap.
        attempts: on how many workers a shard may fail before the run is stopped.
    """

    def __init__(
        self,
        *,
        shards_of: Callable[[int], int],
        first_step: int,
        last_step: int,
        rule: Rule,
        patience: float = 1.5,
        attempts: int = 2,
    ) -> None:
        self.step = first_step
        self.phase = Phase.COMPUTING
        self._shards_of = shards_of
        self._last_step = last_step
        self._rule = rule
        self._patience = patience
        self._attempts = attempts
        self._members: dict[int, _Member] = {}  # in order
        self.reason = "all steps are done"  # why the run ends where it ends
        self._trail: deque[Event] = deque(maxlen=20)
        self._begin_step()

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take an event that happened at time ``now``.

        Raises:
            ProtocolError: the event contradicts what went before; it carries the last events.
        """
        self._trail.append(event)
        effects: list[Effect] = []
        match event:
            case Joined(worker):
                if worker in self._members:
                    raise self._error(f"worker {worker} joined twice")
                self._members[worker] = _Member()
                self._members = dict(sorted(self._members.items()))
                self._assign_homes()
            case Left(worker):
                self._leave(worker)
            case Done(worker, step, shard):
                effects += self._done(self._end_task(worker, step, shard, now), worker)
            case Failed(worker, step, shard):
                self._end_task(worker, step, shard, None)
                effects += self._failed(worker, step, shard)
            case Applied(step):
                if self.phase is not Phase.APPLYING or step != self.step:
                    raise self._error(f"no update of step {step} was asked for")
                self.step += 1
                self._begin_step()
            case Stop(reason):
                self._stop(reason)
            case Tick():
                pass
        if self.phase is Phase.COMPUTING:
            if self.step >= self._last_step:
                self.phase = Phase.FINISHED
                effects.append(Finish(self.step, self.reason))
            elif len(self._kept) >= self._rule.needed(self._shards):
                self.phase = Phase.APPLYING
                effects.append(Apply(self.step, tuple(sorted(set(self._kept.values())))))
            else:
                effects += self._deal(now)
        return effects

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers that have joined and not left, in order."""
        return tuple(self._members)

    # --- events -----------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self.phase = Phase.COMPUTING
        self._shards = self._shards_of(self.step) if self.step < self._last_step else 0
        self._todo = set(range(self._shards))  # nobody computes or holds them
        self._kept: dict[int, int] = {}  # shard -> the worker that holds it
        self._failures: dict[int, set[int]] = {}  # shard -> the workers it failed on
        self._assign_homes()

    def _assign_homes(self) -> None:
        """Give each worker its home: a contiguous run of shards, while the present ones stay."""
        count = len(self._members)
        self._homes = {
            worker: range(rank * self._shards // count, (rank + 1) * self._shards // count)
            for rank, worker in enumerate(self._members)
        }

    def _leave(self, worker: int) -> None:
        if worker not in self._members:
            raise self._error(f"worker {worker} left and had not joined")
        del self._members[worker]
        self._assign_homes()
        lost = {shard for shard, holder in self._kept.items() if holder == worker}
        for shard in lost:
            del self._kept[shard]
        if lost and self.phase is Phase.APPLYING:
            self.phase = Phase.COMPUTING  # nothing was applied: the sums went with the worker
        self._todo = set(range(self._shards)) - self._kept.keys() - self._running().keys()

    def _end_task(self, worker: int, step: int, shard: int, now: float | None) -> _Task:
        member = self._members.get(worker)
        task = member.task if member is not None else None
        if member is None or task is None or (task.step, task.shard) != (step, shard):
            raise self._error(f"worker {worker} was not computing step {step}, shard {shard}")
        member.task = None
        if now is not None:
            member.times_s.append(now - task.since)
            member.usual_s = median(member.times_s)
        return task

    def _done(self, task: _Task, worker: int) -> list[Effect]:
        current = task.step == self.step and self.phase is Phase.COMPUTING
        if not current or task.shard in self._kept:
            return [Discard(worker, task.step, task.shard)]
        self._kept[task.shard] = worker
        return [Keep(worker, task.step, task.shard)]

    def _failed(self, worker: int, step: int, shard: int) -> list[Effect]:
        if step != self.step or self.phase is not Phase.COMPUTING or shard in self._kept:
            return []  # a copy that nobody needs any more
        failed_on = self._failures.setdefault(shard, set())
        failed_on.add(worker)
        if shard not in self._running():
            self._todo.add(shard)
        if len(failed_on) >= self._attempts or not self._members.keys() - failed_on:
            self.phase = Phase.FINISHED
            return [Abort(worker, step, shard)]
        return []

    def _stop(self, reason: str) -> None:
        begun = self.phase is Phase.APPLYING or len(self._todo) < self._shards
        last = self.step + 1 if begun else self.step
        if last < self._last_step:
            self._last_step, self.reason = last, reason

    # --- dealing ----------------------------------------------------------------------------------

    def _deal(self, now: float) -> Iterator[Effect]:
        # 1. Shards that nobody has begun.
        for worker in self._idle() if self._todo else ():
            if (choice := self._next_shard(worker)) is not None:
                yield self._give(worker, *choice, now)
        # 2. Copies of those that are far behind, the furthest first.
        idle = self._idle()
        overdue = self._overdue() if idle else []
        late = [(at, shard, runner) for at, shard, runner in overdue if at <= now]
        for worker in idle if late else ():
            for entry in late:
                _, shard, runner = entry
                if worker not in self._failures.get(shard, ()):
                    late.remove(entry)
                    reason = f"worker {runner} is far behind its usual time"
                    yield self._give(worker, shard, reason, now)
                    break
        # 3. Another look when the next one is.
        if self._idle() and (ahead := [at for at, _, _ in overdue if at > now]):
            yield Wake(min(ahead))

    def _idle(self) -> list[int]:
        return [worker for worker, member in self._members.items() if member.task is None]

    def _give(self, worker: int, shard: int, reason: str, now: float) -> Compute:
        self._todo.discard(shard)
        self._members[worker].task = _Task(self.step, shard, now)
        return Compute(worker, self.step, shard, reason)

    def _next_shard(self, worker: int) -> tuple[int, str] | None:
        """Which of the shards that nobody has begun an idle worker computes, and why."""
        home = self._homes[worker]
        own = next((s for s in home if s in self._todo and self._may_try(worker, s)), None)
        if own is not None:
            return own, "home shard"
        allowed = {shard for shard in self._todo if self._may_try(worker, shard)}
        if not allowed:
            return None
        # From the end of the longest run that is left, so that its owner's run stays whole.
        longest = max((allowed.intersection(home) for home in self._homes.values()), key=len)
        return max(longest or allowed), "nobody has begun it"

    def _may_try(self, worker: int, shard: int) -> bool:
        """Whether the shard has not failed on this worker, or there is nobody else to try it."""
        failed_on = self._failures.get(shard)
        return failed_on is None or worker not in failed_on or self._members.keys() <= failed_on

    def _running(self) -> dict[int, list[int]]:
        """Shards of this step that are being computed, with the workers on each."""
        running: dict[int, list[int]] = {}
        for worker, member in self._members.items():
            if member.task is not None and member.task.step == self.step:
                running.setdefault(member.task.shard, []).append(worker)
        return running

    def _overdue(self) -> list[tuple[float, int, int]]:
        """When each shard with one copy is far behind, the shard and its worker; soonest first.

        A worker without a time of its own is measured by the others'; before one is known, nobody
        is behind.
        """
        known = [m.usual_s for m in self._members.values() if m.usual_s is not None]
        of_all_s = median(known) if known else None
        overdue = []
        for shard, runners in self._running().items():
            member = self._members[runners[0]]
            usual_s = of_all_s if member.usual_s is None else member.usual_s
            if len(runners) > 1 or shard in self._kept:
                continue  # the loser of two copies may still be running
            if member.task is not None and usual_s is not None:
                overdue.append((member.task.since + self._patience * usual_s, shard, runners[0]))
        return sorted(overdue)

    def _error(self, message: str) -> ProtocolError:
        return ProtocolError(f"{message} (step {self.step}, {self.phase.value})", self._trail)
