"""Workers in memory: an engine without threads, processes or waiting.

Real replicas compute the shards, one after the other, in the thread of the coordinator, so the bits
are the same as with any other engine. A script of moves decides what happens, and in which order.
After the end of the script, or without a script, workers behave normally.

Time is virtual: a shard takes one second unless the test says otherwise, and waiting takes no real
time. So tests of stragglers and timeouts are fast, and every run takes the same course.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf, nextafter
from queue import Empty
from typing import Any

from quorate.coordination.protocol import Compute, Effect, Event, Joined, Left, WorkerEffect
from quorate.engines import Transport
from quorate.engines.job import Job, OriginalModel, Task, Training
from quorate.engines.job_channel import Request, StepSums
from quorate.engines.local.towers import Towers, TowersChannel
from quorate.engines.shard_runner import Outcome, ShardFailure
from quorate.errors import QuorateError, SettingError, WorkerError
from quorate.replica.buffers import Buffers
from quorate.replica.replica import Replica
from quorate.training.observer import observing
from quorate.training.state import State


class ScriptError(QuorateError, AssertionError):
    """A script that cannot be followed: a move is impossible, or nothing more will happen."""


@dataclass(frozen=True)
class Finishes:
    """A worker computes its current shard and finishes."""

    worker: int


@dataclass(frozen=True)
class Fails:
    """User code raises ``error`` on a worker, in its current shard."""

    worker: int
    error: BaseException = field(default_factory=lambda: RuntimeError("as the script says"))


@dataclass(frozen=True)
class LeavesOff:
    """A worker abandons its current shard, after the coordinator has canceled the shard."""

    worker: int


@dataclass(frozen=True)
class Leaves:
    """A worker disappears, as after a kill."""

    worker: int
    #: whether the worker crashed by itself: its shard may be the cause
    crashed: bool = False
    #: whether the results of open steps remain; otherwise they are lost
    results_stay: bool = False


@dataclass(frozen=True)
class Joins:
    """A worker joins: late, if this is its first move, or after it has left."""

    worker: int


@dataclass(frozen=True)
class Hangs:
    """A worker stops responding, until the coordinator replaces the worker."""

    worker: int


Move = Finishes | Fails | LeavesOff | Leaves | Joins | Hangs


BLOCKS_S = 5.0  # seconds that ``receive`` waits for another thread when no worker acts any more


def one_second(worker: int, step: int, shard: int) -> float:  # noqa: ARG001
    """Return how long a shard takes: a second anywhere."""
    return 1.0


class InMemory(Towers):
    """A ``Transport`` whose workers, towers without threads, follow a script.

    Args:
        replicas: one replica per worker.
        buffers: buffers of the coordinator's model.
        script: moves of the workers in the first training job, in order. All workers are present at
            the start, except workers whose first move is ``Joins``. After the end of the script,
            each worker finishes its shard when the time of the shard is over, and abandons canceled
            shards at once.
        threads: intra-op threads. The bits of matrix products depend on ``threads``.
        time_s: ``time_s(w, t, s)`` returns the virtual seconds that worker w takes for shard s of
            step t. Affects only copies of shards and timeouts. Default: one second.
        skips: whether to skip impossible moves. Default: an impossible move is an error.
        original: the model that the replicas copy. Default: user code changes no model.
    """

    can_replace = True
    takes_runs = False
    have_threads = False

    def __init__(
        self,
        replicas: Sequence[Replica],
        buffers: Buffers,
        script: Iterable[Move] = (),
        *,
        threads: int = 1,
        time_s: Callable[[int, int, int], float] = one_second,
        skips: bool = False,
        original: OriginalModel | None = None,
    ) -> None:
        given = iter(replicas)
        super().__init__(
            [replica.group for replica in replicas],
            lambda _: next(given),
            buffers,
            threads=threads,
            original=original or OriginalModel(_no_changes, dict, int),
        )
        self.script = deque(script)
        self.happened: list[Event | Effect] = []  # events, and what the coordinator sent
        self.time_s = time_s
        self.skips = skips
        for move in self.script:
            if move.worker not in range(len(replicas)):
                raise ScriptError(f"{move}: there are workers 0 to {len(replicas) - 1}")
        first_moves = {move.worker: move for move in reversed(self.script)}
        late = {worker for worker, move in first_moves.items() if isinstance(move, Joins)}
        for worker in {*range(len(replicas))} - late:
            self.towers[worker].begin()

    @property
    def present(self) -> set[int]:
        """The workers that have joined, and have not left since."""
        return {n for n, tower in enumerate(self.towers) if tower.native_id is not None}

    def open(self, job: Job) -> InMemoryChannel:
        """Begin a job. The first training job follows the script."""
        script: deque[Move] = deque()
        if isinstance(job, Training):
            script, self.script = self.script, deque()
        return InMemoryChannel(job, self, script)


class InMemoryChannel(TowersChannel):
    """The channel of one job to workers in memory.

    Args:
        job: the job.
        transport: the owner of the workers.
        script: the moves to come.
    """

    def __init__(self, job: Job, transport: InMemory, script: deque[Move]) -> None:
        super().__init__(job, transport)
        self._transport = transport
        self._script = script
        self._due: dict[int, float] = {}  # by worker: end of the shard, unless the script differs
        self._hung: set[int] = set()  # workers
        self._now = float(int(time.monotonic()))  # seconds and halves of seconds add up exactly
        for worker in sorted(transport.present):
            self.inbox.put(Joined(worker))

    # --- calls of the coordinator -----------------------------------------------------------------

    def now(self) -> float:
        """Return the virtual time."""
        return self._now

    def send(self, effect: WorkerEffect) -> None:
        """Carry out an effect. A worker computes a shard when the shard ends."""
        self._transport.happened.append(effect)
        worker = effect.worker
        is_free = worker in self._transport.present and worker not in self.requests
        if isinstance(effect, Compute) and not is_free:
            raise ScriptError(f"worker {worker} is not there, or is busy: {effect}")
        super().send(effect)

    def receive(self, timeout_s: float | None) -> Event | None:
        """Return the next event; if the event is later, let ``timeout_s`` pass and return None.

        Raises:
            ScriptError: the script's next move is impossible, or nothing will happen any more.
        """
        until = inf if timeout_s is None else self.now() + timeout_s
        if timeout_s:
            until = max(until, nextafter(self.now(), inf))  # a very short time must pass too
        event = self._receive(until)
        if event is not None:
            self._transport.happened.append(event)
        return event

    # --- effects ----------------------------------------------------------------------------------

    def _request(self, effect: Compute, request: Request) -> None:
        super()._request(effect, request)
        takes_s = self._transport.time_s(effect.worker, request.step, request.shard)
        self._due[effect.worker] = self.now() + takes_s

    def _replace(self, worker: int, reason: str) -> None:
        if worker in self.requests and worker not in self._hung and self._due[worker] <= self.now():
            # The shard would be done, if the script did not wait for something else.
            raise self._impossible()
        if worker in self._transport.present:
            self.inbox.put(self._leave(worker, reason, crashed=True))
            self.inbox.put(self._join(worker))

    # --- the next event ---------------------------------------------------------------------------

    def _receive(self, until: float) -> Event | None:
        while self.inbox.empty():  # events of other threads, and answers, come first
            at, play = self._next_move()
            if at == inf and self._script and self._transport.skips:
                self._script.popleft()
            elif at <= until and at < inf:
                self._now = at
                if self._script:
                    self._script.popleft()
                if (event := play()) is not None:
                    return event
            elif until < inf:  # the coordinator may make a move possible
                self._now = until
                return None
            elif self._script:
                raise self._impossible()
            else:
                break
        try:
            return self._event_of(self.inbox.get(timeout=BLOCKS_S))
        except Empty:
            raise ScriptError(f"nothing will happen any more: {self._situation()}") from None

    def _next_move(self) -> tuple[float, Callable[[], Event | None]]:
        """Return when the next move is possible, and a function to make the move.

        After the end of the script each worker finishes its shard, or leaves off.
        """
        if self._script:
            return self._possible(self._script[0])
        # Whoever leaves off was told so later than others who finish at the same time.
        requests = sorted(self.requests.items(), key=lambda each: each[1].is_cancelled)
        moves = [LeavesOff(w) if r.is_cancelled else Finishes(w) for w, r in requests]
        possible = map(self._possible, moves)
        return min(possible, key=lambda each: each[0], default=(inf, lambda: None))

    def _possible(self, move: Move) -> tuple[float, Callable[[], Event | None]]:
        """Return when a move is possible, infinite if not now, and a function to make the move."""
        worker, now = move.worker, self.now()
        is_there = worker in self._transport.present
        request = None if worker in self._hung else self.requests.get(worker)
        done_at = inf if request is None else max(self._due[worker], now)
        match move:
            case Joins():
                return inf if is_there else now, partial(self._join, worker)
            case Leaves(_, crashed, stay):
                reason = "as the script says"
                leave = partial(self._leave, worker, reason, crashed=crashed, stay=stay)
                return now if is_there else inf, leave
            case Hangs():
                return inf if request is None else now, partial(self._hung.add, worker)
            case LeavesOff():
                is_cancelled = request is not None and request.is_cancelled
                return now if is_cancelled else inf, partial(self._end_with, worker, None)
            case Finishes():
                return done_at, partial(self._finish, worker)
            case Fails(_, error):
                return done_at, partial(self._fail, worker, error)

    def _impossible(self) -> ScriptError:
        return ScriptError(f"{self._script[0]} is impossible: {self._situation()}")

    def _situation(self) -> str:
        tasks = ", ".join(
            f"worker {worker} {'hangs in' if worker in self._hung else 'has'} shard "
            f"{request.shard} of step {request.step}"
            for worker, request in self.requests.items()
        )
        absent = sorted({*range(len(self._sums))} - self._transport.present)
        return f"{tasks or 'nobody has a shard'}; absent: {absent or 'nobody'}"

    # --- workers ----------------------------------------------------------------------------------

    def _finish(self, worker: int) -> None:
        """Have a worker compute its shard, for the inbox."""
        self.requests[worker].is_cancelled = False  # too late
        self._transport.towers[worker].run()

    def _fail(self, worker: int, error: BaseException) -> Event:
        request, replica = self.requests[worker], self._transport.towers[worker].runner.replica
        self.job.annotate(error, Task(worker, request.step, request.shard), replica.device)
        return self._end_with(worker, ShardFailure(request.shard, error))

    def _end_with(self, worker: int, outcome: Outcome) -> Event:
        sheet = self._transport.towers[worker].runner.sheet
        return self._answered(worker, outcome, sheet.recorded(cuts=True))

    def _end(self, worker: int) -> Request:
        self._hung.discard(worker)
        return super()._end(worker)

    def _leave(self, worker: int, reason: str, *, crashed: bool, stay: bool = False) -> Left:
        self._lose(worker, WorkerError(f"worker {worker} ended: {reason}"))
        if not stay:
            self._sums[worker] = StepSums(self.job.plan, self._sums[worker].recycle)
        self._transport.towers[worker].end()
        return Left(worker, reason, crashed=crashed, results_stay=stay)

    def _join(self, worker: int) -> Joined:
        self._transport.towers[worker].begin()
        return Joined(worker)


def _no_changes() -> Any:
    """Return None: user code changes no model."""


@contextmanager
def in_memory(
    script: Iterable[Move] = (),
    *,
    time_s: Callable[[int, int, int], float] = one_second,
    skips: bool = False,
) -> Iterator[list[Event | Effect]]:
    """Give the loops of a trainer workers in memory within the block, one per tower.

    Args:
        script: moves of the workers in the first loop. Later loops have no script.
        time_s: duration of a shard; see ``InMemory``.
        skips: whether impossible moves are skipped; see ``InMemory``.

    Yields:
        A list of everything so far: events, and effects that the coordinator sent, in order.

    Raises:
        SettingError: the trainer has no towers; use ``Workers(engine="towers")``.
    """
    moves = list(script)
    happened: list[Event | Effect] = []

    def replace(transport: Transport, state: State, facts: Mapping[str, Any]) -> Transport:
        if not isinstance(transport, Towers):
            transport.close()
            raise SettingError(
                "engine", facts["engine"], "towers", "workers in memory take the place of towers"
            )
        workers = InMemory(
            transport.replicas,
            state.buffers,
            moves,
            threads=transport.threads,
            time_s=time_s,
            skips=skips,
            original=transport.original,
        )
        moves.clear()
        workers.happened = happened
        transport.close()
        return workers

    with observing(replace):
        yield happened
