"""The conversation with workers in memory: what happens next, and when.

First what follows from what the coordinator asked for; then the script's next move, as soon as it
is possible; and when the script is over, whoever is done first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, nextafter
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from quorate.coordination.protocol import (
    Cancel,
    Cancelled,
    Compute,
    Discard,
    Done,
    Event,
    Failed,
    Joined,
    Keep,
    Left,
    Replace,
)
from quorate.engines.job import Job, Task
from quorate.engines.local.step_sums import StepSums
from quorate.errors import WorkerError
from quorate.replica.compute_thread import as_compute_thread
from quorate.replica.replica import Replica
from quorate.replica.shard_sum import Part, ShardSum
from quorate.replica.snapshots import Snapshot, Snapshots, new_vectors
from quorate.replica.streams import Stream
from quorate.testing.moves import (
    Fails,
    Finishes,
    Hangs,
    Joins,
    Leaves,
    LeavesOff,
    Move,
    ScriptError,
)

if TYPE_CHECKING:
    from quorate.testing.transport import InMemory

BLOCKS_S = 5.0  # how long ``receive`` waits for another thread when no worker will do anything


@dataclass
class _Given:
    """A shard that a worker was given."""

    step: int
    shard: int
    due: float  # when it is done, if the script does not say otherwise
    snapshot: Snapshot | None
    is_cancelled: bool = False
    is_hung: bool = False


class InMemoryChannel:
    """A ``Channel``: one job's conversation with workers in memory."""

    def __init__(self, job: Job, transport: InMemory, script: deque[Move]) -> None:
        self._job = job
        self._transport = transport
        self._script = script
        self._feed = job.feed(moves_to=transport.replicas[0].device)
        self._tasks: dict[int, _Given] = {}  # by worker, in the order in which they were dealt
        self._sums = [StepSums(job.plan, replica) for replica in transport.replicas]
        self._errors: dict[tuple[int, int, int], BaseException] = {}
        self._collected: list[tuple[Replica, ShardSum]] = []  # by the last ``collect``
        self._posted: SimpleQueue[Event] = SimpleQueue()
        # Happens next, whatever the script says.
        self._next: deque[Event] = deque(map(Joined, sorted(transport.present)))
        self._snapshots: Snapshots | None = None
        if job.on_snapshots:
            buffers, numbers = transport.buffers, range(len(self._sums) + 1)
            slots = {number: new_vectors(job.parameters, buffers) for number in numbers}
            self._snapshots = Snapshots(job.parameters, buffers, slots)

    # --- what the coordinator calls ---------------------------------------------------------------

    def now(self) -> float:
        """Return the virtual time."""
        return self._transport.clock_s

    def send(self, effect: Compute | Keep | Discard | Cancel | Replace) -> None:
        """Note what a worker is to do; it does so when its move comes."""
        self._transport.happened.append(effect)
        worker = effect.worker
        match effect:
            case Compute(_, step, shard):
                if worker not in self._transport.present or worker in self._tasks:
                    raise ScriptError(f"worker {worker} is not there, or is busy: {effect}")
                due = self.now() + self._transport.time_s(worker, step, shard)
                lent = None if self._snapshots is None else self._snapshots.lend(worker)
                self._tasks[worker] = _Given(step, shard, due, lent)
            case Keep():
                self._sums[worker].keep(effect)
                self._sums[worker].add_kept()
            case Discard():
                self._sums[worker].discard(effect)
            case Cancel(_, step, shard):
                task = self._tasks.get(worker)
                if task is not None and (task.step, task.shard) == (step, shard):
                    task.is_cancelled = True
            case Replace(_, reason):
                task = self._tasks.get(worker)
                if task is not None and not task.is_hung and task.due <= self.now():
                    # It would have been done, if the script did not wait for something else.
                    raise self._impossible()
                if worker in self._transport.present:
                    self._next += [self._leave(worker, reason, crashed=True), self._join(worker)]

    def receive(self, timeout_s: float | None) -> Event | None:
        """Return what happens next; if that is later, let ``timeout_s`` pass and return None.

        Raises:
            ScriptError: the script's next move is impossible, or nothing will happen any more.
        """
        event = self._receive(inf if timeout_s is None else self.now() + timeout_s)
        if event is not None:
            self._transport.happened.append(event)
        return event

    def post(self, event: Event) -> None:
        """Put in an event of the coordinator's own."""
        self._posted.put(event)

    def collect(self, step: int, holders: Sequence[int]) -> list[Part]:
        """Return what the holders hold of a step, and hold it no longer."""
        parts: list[Part] = []
        for worker in holders:
            for node, value in self._sums[worker].take(step):
                self._collected.append((self._transport.replicas[worker], value))
                parts.append((node, value))
        return parts

    def publish(self) -> None:
        """Take back what was collected, and a snapshot of the parameters as they are now."""
        for replica, value in self._collected:
            replica.recycle(value)
        self._collected = []
        if self._snapshots is not None:
            self._snapshots.renew()

    def error(self, worker: int, step: int, shard: int) -> BaseException:
        """Return what was raised in a shard, or how its worker ended."""
        return self._errors[worker, step, shard]

    def close(self) -> None:
        """End the job. What was not computed never is."""
        self._feed.close()

    # --- what happens next ------------------------------------------------------------------------

    def _receive(self, until: float) -> Event | None:
        while True:
            # 1. What others put in, and what follows from what the coordinator asked for.
            if not self._posted.empty():
                return self._posted.get()
            if self._next:
                return self._next.popleft()
            # 2. The script's next move; while there is one, nothing else happens.
            if self._script:
                move = self._script[0]
                if (at := self._possible_at(move)) <= until:
                    self._script.popleft()
                    self._pass_to(at)
                    if (event := self._play(move)) is not None:
                        return event
                    continue
                if at == inf and self._transport.skips:
                    self._script.popleft()
                    continue
                # It may be possible once the coordinator has looked again.
                if until < inf:
                    self._pass_to(until)
                    return None
                raise self._impossible()
            # 3. Whoever is done first; of several, whoever began first.
            ends = [(self._ends_at(task), worker) for worker, task in self._tasks.items()]
            at, worker = min(ends, default=(inf, -1), key=lambda end: end[0])
            if at <= until and at < inf:
                self._pass_to(at)
                is_cancelled = self._tasks[worker].is_cancelled
                return self._leave_off(worker) if is_cancelled else self._finish(worker)
            # 4. Nobody: time passes, or another thread has something to say.
            if until < inf:
                self._pass_to(until)
                return None
            try:
                return self._posted.get(timeout=BLOCKS_S)
            except Empty:
                raise ScriptError(f"nothing will happen any more: {self._situation()}") from None

    def _pass_to(self, at: float) -> None:
        # A time so close that no float lies between must pass too, or whoever waits would for ever.
        clock_s = self._transport.clock_s
        self._transport.clock_s = max(at, nextafter(clock_s, inf)) if at > clock_s else clock_s

    def _ends_at(self, task: _Given) -> float:
        if task.is_hung:
            return inf
        return self.now() if task.is_cancelled else max(task.due, self.now())

    def _possible_at(self, move: Move) -> float:
        """Return when a move can be made; infinite: not as things are."""
        task = self._tasks.get(move.worker)
        match move:
            case Joins(worker):
                is_possible = worker not in self._transport.present
            case Leaves(worker):
                is_possible = worker in self._transport.present
            case Hangs():
                is_possible = task is not None and not task.is_hung
            case LeavesOff():
                is_possible = task is not None and task.is_cancelled and not task.is_hung
            case Finishes() | Fails():
                if task is None or task.is_hung:
                    return inf
                return max(task.due, self.now())
        return self.now() if is_possible else inf

    def _play(self, move: Move) -> Event | None:
        match move:
            case Finishes(worker):
                return self._finish(worker)
            case Fails(worker, error):
                task = self._end(worker)
                return self._fail(worker, task, error)
            case LeavesOff(worker):
                return self._leave_off(worker)
            case Leaves(worker):
                return self._leave(
                    worker, "as the script says", crashed=move.crashed, stay=move.results_stay
                )
            case Joins(worker):
                return self._join(worker)
            case Hangs(worker):
                self._tasks[worker].is_hung = True
                return None

    def _impossible(self) -> ScriptError:
        return ScriptError(f"{self._script[0]} is impossible: {self._situation()}")

    def _situation(self) -> str:
        tasks = ", ".join(
            f"worker {worker} {'hangs in' if task.is_hung else 'has'} shard {task.shard} of step "
            f"{task.step}"
            for worker, task in self._tasks.items()
        )
        absent = sorted({*range(len(self._sums))} - self._transport.present)
        return f"{tasks or 'nobody has a shard'}; absent: {absent or 'nobody'}"

    # --- what workers do --------------------------------------------------------------------------

    def _end(self, worker: int) -> _Given:
        task = self._tasks.pop(worker)
        if self._snapshots is not None:
            self._snapshots.give_back(worker)
        return task

    def _finish(self, worker: int) -> Event:
        """Compute the shard that a worker has."""
        given, sheet = self._tasks[worker], self._transport.sheets[worker]
        replica, step, shard = self._transport.replicas[worker], given.step, given.shard
        at = partial(sheet.tell, step=step, shard=shard)
        task = Task(worker, step, shard, at=at, snapshot=given.snapshot)
        try:
            with as_compute_thread(self._transport.threads, replica.device), Stream() as stream:
                result = self._job.compute(replica, stream, self._feed, task)
        except Exception as error:
            return self._fail(worker, self._end(worker), error)
        finally:
            sheet.tell("waiting")
        self._end(worker)
        self._sums[worker].pending[step, shard] = result.computed_by(worker, shard)
        return Done(worker, step, shard)

    def _fail(self, worker: int, given: _Given, error: BaseException) -> Failed:
        step, shard = given.step, given.shard
        device = self._transport.replicas[worker].device
        self._job.annotate(error, Task(worker, step, shard), device)
        self._errors[worker, step, shard] = error
        return Failed(worker, step, shard)

    def _leave_off(self, worker: int) -> Cancelled:
        task = self._end(worker)
        return Cancelled(worker, task.step, task.shard)

    def _leave(self, worker: int, reason: str, *, crashed: bool, stay: bool = False) -> Left:
        if worker in self._tasks:
            task = self._end(worker)
            error = WorkerError(f"worker {worker} ended: {reason}")
            self._errors[worker, task.step, task.shard] = error
        if not stay:
            self._sums[worker] = StepSums(self._job.plan, self._transport.replicas[worker])
        self._transport.present.discard(worker)
        return Left(worker, reason, crashed=crashed, results_stay=stay)

    def _join(self, worker: int) -> Joined:
        self._transport.present.add(worker)
        return Joined(worker)
