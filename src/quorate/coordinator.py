"""The coordinator's decisions: a pure state machine. Events and the time go in, effects come out.

No torch, socket, thread or clock is in here. Whoever drives it (see ``drive``) carries out the
effects in their order and reports what happened as events. So every order of events can be tried,
and a thousand workers be simulated in a loop.

A step: its shards are dealt to workers one at a time. Each worker has home shards, a contiguous
run, so that its rows can be fetched ahead and its sums merge into few vectors. An idle worker takes
a shard that nobody has begun, and when there is none, a copy of one whose worker is far behind its
usual time, or is usually so slow that the idle one will be done before it. The first copy that is
done is kept and the other discarded; the bits are the same. When enough shards are kept, the update
is applied, and the next step begins.

A worker that has been silent for too long is replaced. A shard that fails, or takes its worker with
it, is tried on another worker, and then ends the run.

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
from math import inf
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
    """Worker w is gone."""

    worker: int
    reason: str
    crashed: bool = False  # by its own doing: what it was computing may be to blame
    results_stay: bool = False  # else whatever it had computed of the current step went with it


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
    place: tuple[int, int] = field(default=(0, 1), compare=False)  # where the worker is at home
    instead_of: int | None = field(default=None, compare=False)  # the worker that is slow with it


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
class Replace:
    """Worker w has not answered for too long: end it, report ``Left``, and start another."""

    worker: int
    reason: str


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


Effect = Compute | Keep | Discard | Apply | Replace | Wake | Abort | Finish


def home(place: tuple[int, int], shards: int) -> range:
    """The home shards of the worker at a place (rank, number of workers): a contiguous run.

    With more workers than shards the first have one each, and the others none.
    """
    rank, workers = place[0], min(place[1], shards)
    if rank >= workers:
        return range(0)
    return range(-(-rank * shards // workers), -(-(rank + 1) * shards // workers))


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
    place: tuple[int, int] = (0, 1)  # (rank, number of workers)
    is_replaced: bool = False
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=15))  # of its last shards
    usual_s: float | None = None  # their median


@dataclass(frozen=True)
class _Single:
    """A shard that one worker alone computes."""

    worker: int
    shard: int
    behind_at: float  # when it is far behind
    done_at: float  # when it will be done, if it takes as long as usual


class Coordinator:
    """Plans steps ``first_step`` to ``last_step`` - 1 and says who computes what.

    Args:
        shards_of: V of a step, a pure function.
        first_step: updates applied so far.
        last_step: updates applied at the end.
        rule: how many shards make an update.
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
        patience: float = 1.5,
        attempts: int = 2,
        timeout_s: float | None = None,
    ) -> None:
        self.first_step = self.step = first_step
        self.begun_at: float | None = None  # when the first worker joined
        self.phase = Phase.COMPUTING
        self._shards_of = shards_of
        self._last_step = last_step
        self._rule = rule
        self._patience = patience
        self._attempts = attempts
        self._timeout_s = timeout_s
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
        self._look_at = inf  # when someone will be far behind whom an idle worker could help
        effects: list[Effect] = []
        match event:
            case Joined(worker):
                if worker in self._members:
                    raise self._error(f"worker {worker} joined twice")
                self.begun_at = now if self.begun_at is None else self.begun_at
                self._members[worker] = _Member()
                self._members = dict(sorted(self._members.items()))
                self._assign_homes()
            case Left(worker):
                effects += self._leave(event)
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
                # Only when nothing else is waiting to be handled: a result may be under way.
                effects += self._replace_silent(now)
        if self.phase is Phase.COMPUTING:
            if self.step >= self._last_step:
                self.phase = Phase.FINISHED
                effects.append(Finish(self.step, self.reason))
            elif len(self._kept) >= self._rule.needed(self._shards):
                self.phase = Phase.APPLYING
                effects.append(Apply(self.step, tuple(sorted(set(self._kept.values())))))
            else:
                effects += self._deal(now)
        if self.phase is not Phase.FINISHED:
            look_at = min(self._look_at, self._silence_at(now))
            if look_at < inf:
                effects.append(Wake(look_at))
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
        self._failures: dict[int, list[int]] = {}  # shard -> the workers it failed on
        self._assign_homes()

    def _assign_homes(self) -> None:
        """Give each worker its home: a contiguous run of shards, while the present ones stay."""
        for rank, member in enumerate(self._members.values()):
            member.place = (rank, len(self._members))
        self._homes = {w: home(m.place, self._shards) for w, m in self._members.items()}

    def _leave(self, event: Left) -> list[Effect]:
        worker = event.worker
        if worker not in self._members:
            raise self._error(f"worker {worker} left and had not joined")
        task = self._members.pop(worker).task
        self._assign_homes()
        if not event.results_stay:
            lost = {shard for shard, holder in self._kept.items() if holder == worker}
            for shard in lost:
                del self._kept[shard]
            if lost and self.phase is Phase.APPLYING:
                self.phase = Phase.COMPUTING  # nothing was applied: the sums went with the worker
        self._todo = set(range(self._shards)) - self._kept.keys() - self._running().keys()
        if event.crashed and task is not None and self._is_wanted(task.step, task.shard):
            self._failures.setdefault(task.shard, []).append(worker)
            if len(self._failures[task.shard]) >= self._attempts:
                self.phase = Phase.FINISHED
                return [Abort(worker, task.step, task.shard)]
        return []

    def _is_wanted(self, step: int, shard: int) -> bool:
        return step == self.step and self.phase is Phase.COMPUTING and shard not in self._kept

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
        if not self._is_wanted(task.step, task.shard):
            return [Discard(worker, task.step, task.shard)]
        self._kept[task.shard] = worker
        return [Keep(worker, task.step, task.shard)]

    def _failed(self, worker: int, step: int, shard: int) -> list[Effect]:
        if not self._is_wanted(step, shard):
            return []  # a copy that nobody needs any more
        failed_on = self._failures.setdefault(shard, [])
        failed_on.append(worker)
        if shard not in self._running():
            self._todo.add(shard)
        if len(set(failed_on)) >= self._attempts or self._members.keys() <= set(failed_on):
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
        # 2. Copies of those that are far behind or slow.
        idle = self._idle()
        if not idle:
            return
        single = self._single()
        last_to_be_done = sorted(single, key=lambda entry: -entry.done_at)
        for worker in idle if single else ():
            if (copy := self._next_copy(worker, single, last_to_be_done, now)) is not None:
                entry, reason = copy
                single.remove(entry)
                last_to_be_done.remove(entry)
                yield self._give(worker, entry.shard, reason, now, instead_of=entry.worker)
        # 3. Another look when the next one is.
        if self._idle():
            self._look_at = min((e.behind_at for e in single if e.behind_at > now), default=inf)

    def _idle(self) -> list[int]:
        return [w for w, m in self._members.items() if m.task is None and not m.is_replaced]

    def usual_s(self, worker: int) -> float | None:
        """How long a shard usually takes there, in seconds; None before it is known."""
        member = self._members.get(worker)
        return None if member is None else member.usual_s

    def _give(
        self, worker: int, shard: int, reason: str, now: float, instead_of: int | None = None
    ) -> Compute:
        self._todo.discard(shard)
        member = self._members[worker]
        member.task = _Task(self.step, shard, now)
        return Compute(worker, self.step, shard, reason, member.place, instead_of)

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
        return (
            failed_on is None or worker not in failed_on or self._members.keys() <= set(failed_on)
        )

    def _running(self) -> dict[int, list[int]]:
        """Shards of this step that are being computed, with the workers on each."""
        running: dict[int, list[int]] = {}
        for worker, member in self._members.items():
            if member.task is not None and member.task.step == self.step:
                running.setdefault(member.task.shard, []).append(worker)
        return running

    def _next_copy(
        self, worker: int, single: list[_Single], last_to_be_done: list[_Single], now: float
    ) -> tuple[_Single, str] | None:
        """Which of the shards that others compute an idle worker had better compute too, and why.

        First the one that is furthest behind its worker's usual time; else the one that would be
        done last, if this worker will be done clearly before it.
        """
        for entry in single:
            if entry.behind_at > now:
                break
            if worker not in self._failures.get(entry.shard, ()):
                return entry, f"worker {entry.worker} is far behind its usual time"
        own_s = self._members[worker].usual_s
        if own_s is None:
            return None
        for entry in last_to_be_done:
            if entry.done_at <= now + self._patience * own_s:
                break
            if worker not in self._failures.get(entry.shard, ()):
                return entry, f"worker {entry.worker} is slow"
        return None

    def _single(self) -> list[_Single]:
        """The shards that one worker alone computes and nobody holds, the furthest behind first.

        A worker without a time of its own is measured by the others'; before one is known, nobody
        is behind.
        """
        known = [m.usual_s for m in self._members.values() if m.usual_s is not None]
        of_all_s = median(known) if known else inf
        found = []
        for shard, runners in self._running().items():
            member = self._members[runners[0]]
            # The loser of two copies may still be running.
            if member.task is not None and len(runners) == 1 and shard not in self._kept:
                usual_s = of_all_s if member.usual_s is None else member.usual_s
                since = member.task.since
                found.append(
                    _Single(
                        runners[0],
                        shard,
                        behind_at=since + self._patience * usual_s,
                        done_at=since + usual_s,
                    )
                )
        return sorted(found, key=lambda entry: entry.behind_at)

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
        return ProtocolError(f"{message} (step {self.step}, {self.phase.value})", self._trail)
