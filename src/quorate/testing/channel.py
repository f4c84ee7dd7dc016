"""The conversation with workers in memory: what happens next, and when.

First what follows from what the coordinator asked for; then the script's next move, as soon as it
is possible; and when the script is over, whoever is done first.
"""

from __future__ import annotations

from collections import deque
from math import inf, nextafter
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from quorate.coordination.protocol import (
    Cancel,
    Compute,
    Discard,
    Event,
    Joined,
    Keep,
    Left,
    Replace,
)
from quorate.engines.job import Job, Task
from quorate.engines.job_channel import JobChannel, Request
from quorate.engines.shard_runner import Outcome, ShardFailure, ShardRunner
from quorate.engines.step_sums import StepSums
from quorate.errors import WorkerError
from quorate.machine.signal_handlers import ends_program
from quorate.replica.compute_thread import as_compute_thread
from quorate.replica.snapshots import Snapshots, new_vectors
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


class InMemoryChannel(JobChannel):
    """One job's channel to workers in memory."""

    def __init__(self, job: Job, transport: InMemory, script: deque[Move]) -> None:
        replicas, snapshots = transport.replicas, None
        if job.on_snapshots:
            buffers, numbers = transport.buffers, range(len(replicas) + 1)
            slots = {number: new_vectors(job.parameters, buffers) for number in numbers}
            snapshots = Snapshots(job.parameters, buffers, slots)
        super().__init__(job, [StepSums(job.plan, r.recycle) for r in replicas], snapshots)
        self._transport = transport
        self._script = script
        self._feed = job.feed(moves_to=replicas[0].device)
        self._due: dict[int, float] = {}  # by worker: when its shard is done, without a move
        self._hung: set[int] = set()  # workers
        self._posted: SimpleQueue[Event] = SimpleQueue()
        # Happens next, whatever the script says.
        self._next: deque[Event] = deque(map(Joined, sorted(transport.present)))

    # --- what the coordinator calls ---------------------------------------------------------------

    def now(self) -> float:
        """Return the virtual time."""
        return self._transport.clock_s

    def send(self, effect: Compute | Keep | Discard | Cancel | Replace) -> None:
        """Note what a worker is to do; it does so when its move comes."""
        self._transport.happened.append(effect)
        worker = effect.worker
        if isinstance(effect, Compute) and (
            worker not in self._transport.present or worker in self.requests
        ):
            raise ScriptError(f"worker {worker} is not there, or is busy: {effect}")
        super().send(effect)

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

    def close(self) -> None:
        """End the job. What was not computed never is."""
        self._feed.close()

    # --- what effects do --------------------------------------------------------------------------

    def _request(self, effect: Compute, request: Request) -> None:
        self._due[effect.worker] = self.now() + self._transport.time_s(
            effect.worker, request.step, request.shard
        )

    def _replace(self, worker: int, reason: str) -> None:
        if worker in self.requests and worker not in self._hung and self._due[worker] <= self.now():
            # The shard would be done, if the script did not wait for something else.
            raise self._impossible()
        if worker in self._transport.present:
            self._next += [self._leave(worker, reason, crashed=True), self._join(worker)]

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
            ends = [(self._ends_at(worker), worker) for worker in self.requests]
            at, worker = min(ends, default=(inf, -1), key=lambda end: end[0])
            if at <= until and at < inf:
                self._pass_to(at)
                is_cancelled = self.requests[worker].is_cancelled
                return self._end_with(worker, None) if is_cancelled else self._finish(worker)
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

    def _ends_at(self, worker: int) -> float:
        if worker in self._hung:
            return inf
        is_cancelled = self.requests[worker].is_cancelled
        return self.now() if is_cancelled else max(self._due[worker], self.now())

    def _possible_at(self, move: Move) -> float:
        """Return when a move can be made; infinite: not as things are."""
        worker = move.worker
        request = None if worker in self._hung else self.requests.get(worker)
        match move:
            case Joins():
                is_possible = worker not in self._transport.present
            case Leaves():
                is_possible = worker in self._transport.present
            case Hangs():
                is_possible = request is not None
            case LeavesOff():
                is_possible = request is not None and request.is_cancelled
            case Finishes() | Fails():
                return inf if request is None else max(self._due[worker], self.now())
        return self.now() if is_possible else inf

    def _play(self, move: Move) -> Event | None:
        match move:
            case Finishes(worker):
                return self._finish(worker)
            case Fails(worker, error):
                return self._fail(worker, error)
            case LeavesOff(worker):
                return self._end_with(worker, None)
            case Leaves(worker):
                return self._leave(
                    worker, "as the script says", crashed=move.crashed, stay=move.results_stay
                )
            case Joins(worker):
                return self._join(worker)
            case Hangs(worker):
                self._hung.add(worker)
                return None

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

    # --- what workers do --------------------------------------------------------------------------

    def _finish(self, worker: int) -> Event:
        """Compute the shard that a worker has."""
        request, sheet = self.requests[worker], self._transport.sheets[worker]
        replica = self._transport.replicas[worker]
        runner = ShardRunner(worker, replica, sheet, passes=ends_program)
        with as_compute_thread(self._transport.threads, replica.device), Stream() as stream:
            outcome = runner.run(
                *(self.job, lambda: self._feed, stream, request.step, request.shard, [None]),
                is_cancelled=lambda: False,
                snapshot=request.snapshot,
            )
        sheet.tell("waiting")
        return self._end_with(worker, outcome)

    def _fail(self, worker: int, error: BaseException) -> Event:
        request, device = self.requests[worker], self._transport.replicas[worker].device
        self.job.annotate(error, Task(worker, request.step, request.shard), device)
        return self._end_with(worker, ShardFailure(request.shard, error))

    def _end_with(self, worker: int, outcome: Outcome) -> Event:
        return self._answered(worker, outcome, self._transport.sheets[worker].recorded(cuts=True))

    def _end(self, worker: int) -> Request:
        self._hung.discard(worker)
        return super()._end(worker)

    def _leave(self, worker: int, reason: str, *, crashed: bool, stay: bool = False) -> Left:
        if worker in self.requests:
            request = self._end(worker)
            error = WorkerError(f"worker {worker} ended: {reason}")
            self._errors[worker, request.step, request.shard] = error
        if not stay:
            recycle = self._transport.replicas[worker].recycle
            self._sums[worker] = StepSums(self.job.plan, recycle)
        self._transport.present.discard(worker)
        return Left(worker, reason, crashed=crashed, results_stay=stay)

    def _join(self, worker: int) -> Joined:
        self._transport.present.add(worker)
        return Joined(worker)
