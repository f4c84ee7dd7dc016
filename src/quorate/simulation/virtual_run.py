"""A virtual run: the real coordinator, workers that only pretend, and a clock that only jumps.

The coordinator is the one of ``quorate run``; its effects are carried out as ``training/drive.py``
and a transport do. It does one thing at a time: while it makes an update, events wait for it, and
how long they waited is counted, as that is what bounds many workers under ``async``. A shard takes
as long as a function says. Nothing is computed, so ten thousand workers take seconds.

Legend: V shards of a step, N workers, t step, s shard, w worker. Times are virtual seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple

from quorate.coordination.coordinator import Coordinator
from quorate.coordination.plan import Plan, PlanByShard
from quorate.coordination.protocol import (
    Abort,
    Applied,
    Apply,
    Cancel,
    Cancelled,
    Compute,
    Done,
    Effect,
    Event,
    Finish,
    Joined,
    Keep,
    Left,
    Replace,
    Tick,
    Wake,
)
from quorate.coordination.rules import Rule
from quorate.coordination.tally import Tally
from quorate.errors import ProtocolError
from quorate.simulation.cores import COORDINATOR, SharedCores
from quorate.simulation.event_queue import EventQueue

TIMEOUT_S = 300.0  # as Workers(timeout_s=) is by default


class Failure(NamedTuple):
    """A worker that fails."""

    at_s: float
    worker: int
    detected_s: float = 0.0  # until the coordinator knows
    away_s: float = 3.0  # after that, until it is back; infinite: it does not come back
    crashed: bool = False  # the shard that it was computing may be to blame


class Update(NamedTuple):
    """An update that was made."""

    at_s: float  # when it was done
    took_s: float
    holders: int  # workers that had sums of it
    shards: int
    staleness: int  # of its oldest gradient
    vectors: int  # that reached the coordinator


class ShardWork(NamedTuple):
    """What a shard takes a worker: its seconds on a core of its own, and those that need none.

    One that is told to leave off does so when its parameters are there, and not while its gradient
    is on its way: that is then an answer.
    """

    computing_s: float
    waiting_s: float = 0.0
    pulling_s: float = 0.0
    pushing_s: float = 0.0


class VirtualRun:
    """A run in virtual time. ``play`` it, and read its attributes.

    Args:
        places: the host of each worker, whose number is its place here; that is N.
        shards: V of a batch. Rules that apply shard by shard make V updates of each.
        batches: so many.
        rule: what makes an update.
        shard_s: how long worker w takes for shard s of step t: computing, and otherwise.
        apply_s: how long the update of a step takes of which so many vectors reach the coordinator.
        vectors: how many do, from the worker that holds each shard, and V; default: one of each.
        failures: workers that fail; one of a worker that is away is left out.
        latency_s: of a message, one way.
        leaves_off_s: how long worker w takes to leave off a shard, once it is told.
        cores: that workers, and the coordinator at its updates, share; None: each has its own.
        timeout_s: see ``Coordinator``.
        patience: see ``Coordinator``.
        most_open_per_worker: N times this is ``most_open`` of ``Coordinator``.
        coordinator: makes it, of the arguments of ``Coordinator``.

    Raises:
        ProtocolError: nothing will happen any more, as all workers are gone for good.
    """

    def __init__(
        self,
        *,
        places: Sequence[str],
        shards: int,
        batches: int,
        rule: Rule,
        shard_s: Callable[[int, int, int], float | ShardWork],
        apply_s: Callable[[int], float] = lambda _: 0.0,
        vectors: Callable[[Mapping[int, int], int], int] = lambda held, _: len({*held.values()}),
        failures: Iterable[Failure] = (),
        latency_s: float = 0.0,
        leaves_off_s: Callable[[int], float] = lambda _: 0.01,
        cores: SharedCores | None = None,
        timeout_s: float | None = TIMEOUT_S,
        patience: float = 1.5,
        most_open_per_worker: int = 4,
        coordinator: type[Coordinator] = Coordinator,
    ) -> None:
        self.updates: list[Update] = []
        self.events = 0  # that the coordinator was told
        self.begun = 0  # shards that were given to workers, copies and repetitions among them
        self.copies = 0
        self.queued_s = 0.0  # how long events waited for the coordinator, added up
        kind = PlanByShard if rule.by_shard else Plan
        plan = kind(rows=shards * batches, batch_size=shards, shards=shards, shuffle=False)
        self.coordinator = coordinator(
            shards_of=plan.shards_of,
            home_shards=plan.home_shards,
            next_home=plan.next_home,
            lookahead=plan.lookahead,
            first_step=0,
            last_step=plan.steps_per_epoch,
            rule=rule,
            most_open=most_open_per_worker * len(places),
            timeout_s=timeout_s,
            patience=patience,
        )
        self._shard_s, self._apply_s, self._vectors = shard_s, apply_s, vectors
        self._shards_of = plan.shards_of
        self._held: dict[
            int, dict[int, int]
        ] = {}  # by step and shard: the last that had to keep it
        self._latency_s, self._leaves_off_s = latency_s, leaves_off_s
        self._cores = cores
        self._places = places
        self._queue: EventQueue[Event | Failure] = EventQueue()
        self._is_over = False
        self._wake_at = inf
        # An event of a worker is void once the worker is in another life than when it was posted:
        # it has failed meanwhile, or was told to leave off what it would have reported.
        self._lives = [0] * len(places)
        self._is_away = [False] * len(places)
        # When the shard that it computes would be done; infinite while it shares cores: the end is
        # not known before it comes.
        self._due_at = [0.0] * len(places)
        self._rest_s: dict[int, tuple[float, int, int]] = {}  # of those: after that; step, shard
        self._pulled_at = [0.0] * len(places)
        self._pushing_s = [0.0] * len(places)  # of the shard that it computes
        for worker, place in enumerate(places):
            self._post(0.0, Joined(worker, place))
        for failure in failures:
            self._queue.post(failure.at_s, failure)

    @property
    def now(self) -> float:
        """The virtual time in seconds."""
        return self._queue.now

    @property
    def tally(self) -> Tally:
        """What became of the shards."""
        return self.coordinator.tally

    @property
    def workers(self) -> int:
        """How many workers are there."""
        return len(self.coordinator.workers)

    def play(self) -> None:
        """Play it to its end."""
        while not self._is_over:
            self.advance()

    def advance(self) -> Event | None:
        """Let the next thing happen, and return the event, or None if nobody is told of it."""
        self._end_jobs_on_cores()
        due_at = self._queue.next_at
        event = self._queue.next(self._wake_at)
        if isinstance(event, Failure):  # whenever it is noticed
            self._fail(event)
            return None
        if event is None and self._wake_at == inf:
            message = "nothing will happen any more: all workers are gone for good"
            raise ProtocolError(message, self.updates[-1:])
        event = event or Tick()
        if isinstance(event, Joined):
            self._is_away[event.worker] = False
        elif isinstance(event, Done):
            self.queued_s += self.now - due_at
        self.events += 1
        effects = deque(self.coordinator.handle(event, self.now))
        self._wake_at = inf
        while effects:
            match effect := effects.popleft():
                case Wake(at):
                    self._wake_at = at
                case Apply():
                    effects.extend(self._apply(effect))
                case _:
                    self._carry_out(effect)
        return event

    # --- events -----------------------------------------------------------------------------------

    def _post(self, at: float, event: Joined | Left | Done | Cancelled) -> None:
        """Let a worker report at a time, if it has the same life then."""
        lives, worker = self._lives, event.worker
        life = lives[worker]
        self._queue.post(at, event, lambda: lives[worker] == life)

    def _end_jobs_on_cores(self) -> None:
        """End what is computed on shared cores before anything else happens."""
        cores = self._cores
        while cores is not None and cores.next_at < inf:
            if cores.next_at > min(self._queue.next_at, max(self.now, self._wake_at)):
                return
            self._computed(*cores.end())

    def _computed(self, at: float, worker: int) -> None:
        rest_s, step, shard = self._rest_s.pop(worker)
        self._due_at[worker] = at + rest_s
        self._post(self._due_at[worker], Done(worker, step, shard))

    def _leaves_cores(self, worker: int, at: float) -> None:
        if self._cores is not None and self._cores.leave_off(at, worker):
            del self._rest_s[worker]

    def _fail(self, failure: Failure) -> None:
        worker, at = failure.worker, failure.at_s
        if self._is_away[worker]:
            return
        self._is_away[worker] = True
        self._lives[worker] += 1
        self._leaves_cores(worker, max(self.now, at))
        told_at = at + failure.detected_s
        self._post(told_at, Left(worker, "failed", crashed=failure.crashed))
        if failure.away_s < inf:
            self._post(told_at + failure.away_s, Joined(worker, self._places[worker]))

    # --- effects ----------------------------------------------------------------------------------

    def _apply(self, effect: Apply) -> list[Effect]:
        """Make an update: no event is handled meanwhile."""
        held = self._held.pop(effect.step)
        vectors = self._vectors({s: held[s] for s in effect.shards}, self._shards_of(effect.step))
        began, took_s = self.now, self._apply_s(vectors)
        if self._cores is None or not took_s:
            self._queue.now += took_s
        else:
            self._cores.begin(self.now, COORDINATOR, took_s)
            ended = None
            while ended != COORDINATOR:
                at, ended = self._cores.end()
                if ended != COORDINATOR:
                    self._computed(at, ended)
            self._queue.now, took_s = at, at - began
        number, shards = len(effect.holders), len(effect.shards)
        self.updates.append(Update(self.now, took_s, number, shards, effect.staleness, vectors))
        self.events += 1
        return self.coordinator.handle(Applied(effect.step), self.now)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Compute(worker, step, shard):
                self.begun += 1
                self.copies += effect.instead_of is not None
                if self._is_away[worker]:
                    return  # it has failed, and nobody knows yet
                takes = self._shard_s(worker, step, shard)
                work = takes if isinstance(takes, ShardWork) else ShardWork(takes)
                computing_s, rest_s = work.computing_s, sum(work[1:]) + 2 * self._latency_s
                self._pulled_at[worker] = self.now + self._latency_s + work.pulling_s
                self._pushing_s[worker] = work.pushing_s
                if self._cores is not None and computing_s:
                    self._cores.begin(self.now, worker, computing_s)
                    self._due_at[worker] = inf
                    self._rest_s[worker] = rest_s, step, shard
                    return
                self._due_at[worker] = self.now + computing_s + rest_s
                self._post(self._due_at[worker], Done(worker, step, shard))
            case Keep(worker, step, shard, count):
                held = self._held.setdefault(step, {})
                held |= dict.fromkeys(range(shard, shard + count), worker)
            case Cancel(worker, step, shard):
                # What it has done already is on its way, and counts as an answer.
                told_at = self.now + self._latency_s
                sent_at = self._due_at[worker] - self._latency_s - self._pushing_s[worker]
                if self._is_away[worker] or sent_at <= told_at:
                    return
                self._lives[worker] += 1
                self._leaves_cores(worker, self.now)
                left_off = Cancelled(worker, step, shard)
                told_at = max(told_at, self._pulled_at[worker])
                leaves_at = told_at + self._leaves_off_s(worker) + self._latency_s
                at = min(self._due_at[worker], leaves_at)
                self._post(at, left_off)
            case Replace(worker):
                self._lives[worker] += 1
                self._leaves_cores(worker, self.now)
                self._is_away[worker] = True
                self._post(self.now, Left(worker, "silent"))
                self._post(self.now, Joined(worker, self._places[worker]))
            case Finish() | Abort():
                self._is_over = True
