"""A virtual run: the real coordinator, pretended workers, and a clock that jumps.

The coordinator is the coordinator of ``quorate run``; ``training/drive.py`` and an engine carry out
the same effects. The coordinator does one thing at a time: while the coordinator makes an update,
events wait, and the run counts how long, because the waiting bounds many workers under ``async``.
A function says how long a shard takes. Nothing is computed, so ten thousand workers take seconds.

Legend: V shards of a step, N workers, t step, s shard, w worker. Times are virtual seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from quorate.coordination import protocol
from quorate.coordination.coordinator import Coordinator
from quorate.coordination.plan import Plan, PlanByShard
from quorate.coordination.rules import Rule
from quorate.errors import ProtocolError
from quorate.simulation.event_queue import EventQueue
from quorate.simulation.models import COORDINATOR, ShardWork, SharedCores

TIMEOUT_S = 300.0  # as Workers(timeout_s=) is by default


class WorkerFailure(NamedTuple):
    """The failure of a worker."""

    at_s: float
    worker: int
    detected_s: float = 0.0  # until the coordinator knows
    away_s: float = 3.0  # from then until the worker is back; infinite: the worker stays away
    crashed: bool = False  # the shard of the worker may be to blame


class UpdateRecord(NamedTuple):
    """An update that was made."""

    at_s: float  # the end of the update
    holders: int  # workers with sums of the update
    shards: int
    staleness: int  # of the oldest gradient
    vectors: int  # that reached the coordinator


@dataclass(eq=False, slots=True)
class _Life:
    """A life of a worker, until it fails, is replaced, or receives a cancellation."""

    is_away: bool = False  # the worker has failed or was replaced, and has not joined again
    is_over: bool = False
    # Of the shard that the worker computes.
    done: protocol.Done = field(init=False)
    rest_s: float = 0.0  # from the end of the computation to the arrival of the result
    pulled_at: float = 0.0
    pushing_s: float = 0.0
    due_at: float = inf  # arrival of the result; infinite while the worker shares cores

    def goes_on(self) -> bool:
        """Return whether the reports of the life are valid."""
        return not self.is_over


class VirtualRun:
    """A run in virtual time. Call ``play``, and read the attributes.

    Args:
        places: the host of each worker, (N,).
        shards: V of a batch. Rules that apply shard by shard make V updates of each batch.
        batches: number of batches.
        rule: the update rule.
        shard_s: seconds of worker w for shard s of step t, in all or in parts.
        apply_s: seconds of an update, from the number of vectors that reach the coordinator.
        vectors: number of vectors that reach the coordinator, from the worker that holds each
            shard, and V. Default: one vector per worker.
        failures: failures of workers. Failures of absent workers do not count.
        latency_s: one-way latency of a message.
        leaves_off_s: seconds of worker w to abandon a canceled shard.
        cores: cores shared by workers, and by the coordinator during updates. None: every worker
            has cores of its own.
        timeout_s: see ``Coordinator``.
        patience: see ``Coordinator``.
        most_open_per_worker: ``most_open`` of ``Coordinator``, divided by N.
        coordinator: the class of the coordinator.

    Attributes:
        updates: the updates so far.
        events: number of events that the coordinator received.
        begun: number of shards given to workers, including copies and repetitions.
        copies: number of shards given to a second worker.
        queued_s: sum of the times that results waited for the coordinator.

    Raises:
        ProtocolError: all workers are gone for good.
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
        failures: Iterable[WorkerFailure] = (),
        latency_s: float = 0.0,
        leaves_off_s: Callable[[int], float] = lambda _: 0.01,
        cores: SharedCores | None = None,
        timeout_s: float | None = TIMEOUT_S,
        patience: float = 1.5,
        most_open_per_worker: int = 4,
        coordinator: type[Coordinator] = Coordinator,
    ) -> None:
        self.updates: list[UpdateRecord] = []
        self.events = self.begun = self.copies = 0
        self.queued_s = 0.0
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
        self._held: dict[int, dict[int, int]] = {}  # step -> shard -> the last worker to keep it
        self._latency_s, self._leaves_off_s = latency_s, leaves_off_s
        self._cores = cores
        self._places = places
        self._queue: EventQueue[protocol.Event | WorkerFailure] = EventQueue()
        self._wake_at = inf
        self._lives = [_Life() for _ in places]  # by worker
        for worker, place in enumerate(places):
            self._post(0.0, protocol.Joined(worker, place))
        for failure in failures:
            self._queue.post(failure.at_s, failure)

    @property
    def now(self) -> float:
        """The virtual time in seconds."""
        return self._queue.now

    def play(self) -> None:
        """Play the run to the end."""
        while not self.coordinator.is_over:
            self.advance()

    def advance(self) -> protocol.Event | None:
        """Let the next event happen, and return the event; None: a failure that nobody knows of."""
        self._end_jobs_on_cores()
        event = self._queue.next(self._wake_at)
        if isinstance(event, WorkerFailure):
            if not self._lives[event.worker].is_away:
                left = protocol.Left(event.worker, "failed", crashed=event.crashed)
                self._end(event.at_s + event.detected_s, left, event.away_s)
            return None
        if event is None and self._wake_at == inf:
            message = "nothing will happen any more: all workers are gone for good"
            raise ProtocolError(message, self.updates[-1:])
        event = event or protocol.Tick()
        if isinstance(event, protocol.Joined):
            self._lives[event.worker].is_away = False
        elif isinstance(event, protocol.Done):
            self.queued_s += self.now - self._lives[event.worker].due_at
        self.events += 1
        effects = deque(self.coordinator.handle(event, self.now))
        self._wake_at = inf
        while effects:
            effects.extend(self._carry_out(effects.popleft()))
        return event

    # --- events -----------------------------------------------------------------------------------

    def _post(
        self, at: float, event: protocol.Joined | protocol.Left | protocol.Done | protocol.Cancelled
    ) -> None:
        """Let a worker report at a time, unless the worker's present life ends before."""
        self._queue.post(at, event, self._lives[event.worker].goes_on)

    def _begin_life(self, worker: int, *, is_away: bool) -> None:
        """Void the reports of a worker so far, and free the worker's share of cores."""
        self._lives[worker].is_over = True
        self._lives[worker] = _Life(is_away)
        if self._cores is not None:
            self._cores.leave_off(self.now, worker)

    def _end_jobs_on_cores(self) -> None:
        """End the computations on shared cores that end before the next event."""
        cores = self._cores
        while cores is not None and cores.next_at < inf:
            if cores.next_at > min(self._queue.next_at, max(self.now, self._wake_at)):
                return
            self._computed(*cores.end())

    def _computed(self, at: float, worker: int) -> None:
        """Let a worker that has computed a shard report the result."""
        life = self._lives[worker]
        life.due_at = at + life.rest_s
        self._post(life.due_at, life.done)

    def _end(self, at: float, left: protocol.Left, away_s: float = 0.0) -> None:
        """End a worker now, which the coordinator knows at a time; later the worker is back."""
        self._begin_life(left.worker, is_away=True)
        self._post(at, left)
        self._post(at + away_s, protocol.Joined(left.worker, self._places[left.worker]))

    # --- effects ----------------------------------------------------------------------------------

    def _apply(self, effect: protocol.Apply) -> list[protocol.Effect]:
        """Make an update. No event is handled meanwhile."""
        held = self._held.pop(effect.step)
        vectors = self._vectors({s: held[s] for s in effect.shards}, self._shards_of(effect.step))
        took_s = self._apply_s(vectors)
        if self._cores is None or not took_s:
            self._queue.now += took_s
        else:
            self._cores.begin(self.now, COORDINATOR, took_s)
            while (end := self._cores.end())[1] != COORDINATOR:
                self._computed(*end)
            self._queue.now = end[0]
        number, shards = len(effect.holders), len(effect.shards)
        self.updates.append(UpdateRecord(self.now, number, shards, effect.staleness, vectors))
        self.events += 1
        return self.coordinator.handle(protocol.Applied(effect.step), self.now)

    def _carry_out(self, effect: protocol.Effect) -> list[protocol.Effect]:
        """Carry out an effect, and return the effects that follow."""
        match effect:
            case protocol.Apply():
                return self._apply(effect)
            case protocol.Wake(at):
                self._wake_at = at
            case protocol.Compute():
                self._compute(effect)
            case protocol.Keep(worker, step, shard, count):
                held = self._held.setdefault(step, {})
                held |= dict.fromkeys(range(shard, shard + count), worker)
            case protocol.Cancel():
                self._cancel(effect)
            case protocol.Replace(worker):
                self._end(self.now, protocol.Left(worker, "silent"))
        return []

    def _compute(self, effect: protocol.Compute) -> None:
        worker, step, shard = effect.worker, effect.step, effect.shard
        self.begun += 1
        self.copies += effect.instead_of is not None
        life = self._lives[worker]
        if life.is_away:
            return  # the worker has failed, and the coordinator does not know yet
        takes = self._shard_s(worker, step, shard)
        work = takes if isinstance(takes, ShardWork) else ShardWork(takes)
        life.done = protocol.Done(worker, step, shard)
        life.rest_s = sum(work[1:]) + 2 * self._latency_s
        life.pulled_at = self.now + self._latency_s + work.pulling_s
        life.pushing_s, life.due_at = work.pushing_s, inf
        if self._cores is not None and work.computing_s:
            self._cores.begin(self.now, worker, work.computing_s)
        else:
            self._computed(self.now + work.computing_s, worker)

    def _cancel(self, effect: protocol.Cancel) -> None:
        worker, latency_s = effect.worker, self._latency_s
        life = self._lives[worker]
        # A gradient on the way counts as an answer.
        told_at = self.now + latency_s
        sent_at = life.due_at - latency_s - life.pushing_s
        if life.is_away or sent_at <= told_at:
            return
        self._begin_life(worker, is_away=False)
        leaves_at = max(told_at, life.pulled_at) + self._leaves_off_s(worker) + latency_s
        cancelled = protocol.Cancelled(worker, effect.step, effect.shard)
        self._post(min(life.due_at, leaves_at), cancelled)
