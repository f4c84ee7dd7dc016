"""One job's channel to worker processes: requests as messages, and results in slots of the arena.

A worker has the slot of a shard until the worker has answered or ended; afterwards the coordinator
has the slot until the update of the shard's step. A request has a ticket, and so has the answer.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quorate.coordination import protocol
from quorate.coordination.plan import abridged
from quorate.engines.job import Evaluation, Job, Training
from quorate.engines.job_channel import JobChannel, Request, StepSums
from quorate.engines.processes import worker_messages as messages
from quorate.engines.processes.arena import Arena
from quorate.engines.processes.worker_messages import SlotSum
from quorate.engines.servers import RemoteGradient, Servers
from quorate.engines.shard_runner import Outcome, ShardFailure, joined
from quorate.errors import WorkerError
from quorate.replica.outputs.parcel import unpacked
from quorate.replica.outputs.rows import Piece
from quorate.replica.shard_sum import ShardSum
from quorate.replica.snapshots import Snapshots

if TYPE_CHECKING:
    from quorate.engines.processes.transport import Processes


class ProcessesChannel(JobChannel):
    """A job's channel to worker processes. The coordinator adds all results, while it waits.

    Args:
        number: of the job.
    """

    def __init__(self, workers: Processes, job: Job, number: int) -> None:
        arena, snapshots = workers.arena, None
        if job.on_snapshots:
            slots = {number: arena.slot(number) for number in arena.snapshots}
            own = job.parameters if workers.servers is None else None
            snapshots = Snapshots(own, workers.buffers, slots)
        sums = [StepSums(job.plan, self._recycle)] * len(workers.supervisor.workers)
        super().__init__(job, sums, snapshots)
        self.number = number
        self.has_begun = False
        self._workers = workers
        self._ends: Counter[int] = Counter()  # by worker: ends that ``receive`` has to return
        # Whether workers see the coordinator's current buffers.
        self._is_shown = job.reuses_published_buffers
        # A heap of slots: with the lowest slots first, few slots are ever written.
        self._free = [*arena.lent(again=job.interrupts_training)]

    def send(self, effect: protocol.WorkerEffect) -> None:
        """Carry out an effect. Does not block."""
        servers = self._workers.servers
        if servers is not None and isinstance(effect, protocol.Keep | protocol.Discard):
            self._decide_on(servers, effect)
        super().send(effect)

    def _decide_on(self, servers: Servers, effect: protocol.Keep | protocol.Discard) -> None:
        """Tell servers whether gradients on the servers are needed."""
        worker, step = effect.worker, effect.step
        for shard in range(effect.shard, effect.shard + effect.count):
            gradient = self._sums[worker].result(worker, step, shard).gradient
            if not isinstance(gradient, RemoteGradient):
                continue
            if isinstance(effect, protocol.Keep):
                servers.keep(gradient.ticket, step, shard, self.job.plan.shards_of(step))
            else:
                servers.drop(gradient.ticket)

    def receive(self, timeout_s: float | None) -> protocol.Event | None:
        """Return the next event, or None after ``timeout_s`` seconds; add results meanwhile."""
        if not self.has_begun:
            # Only now: user code that is told of the beginning may change the model, and workers
            # compare what they compute with the coordinator.
            self.has_begun = True
            self._workers.begin(self)
        pump = self._workers.supervisor.pump
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.inbox.empty():
            sums = self._sums[0]
            if sums.has_kept:  # an addition can wait, a worker without a shard cannot
                pump(0.0)
                if self.inbox.empty():
                    sums.add_next()
                continue
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            pump(left_s)
            if self.inbox.empty() and left_s == 0.0:
                return None
        event: protocol.Event = self.inbox.get()
        if isinstance(event, protocol.Left):
            self._ends[event.worker] -= 1
        return event

    def post(self, event: protocol.Event) -> None:
        """Add an event of the coordinator. Safe from any thread and from signal handlers."""
        super().post(event)
        self._workers.wake()

    def publish(self) -> None:
        """Recycle the collected sums; requests from now on use the new parameters and buffers.

        Workers see the new buffers with the next request: user code may change buffers before.
        """
        super().publish()
        self._is_shown = False

    def close(self) -> None:
        """End the job, and free the views of the slots."""
        self._workers.forget(self)
        # The sums refer to this object: without the cycle all memory is free at once.
        self._sums = []
        self._collected.clear()

    # --- reports of workers -----------------------------------------------------------------------

    def joined(self, worker: int, place: str) -> None:
        """Report the beginning of a worker's part in the job."""
        self.inbox.put(protocol.Joined(worker, place))

    def left(self, worker: int, reason: str, *, crashed: bool) -> None:
        """Report the end of a worker: a shard under way is lost, but no finished result.

        Args:
            crashed: whether by the worker's own doing.
        """
        if (request := self.requests.get(worker)) is not None:
            step, shard = request.step, request.shard
            if self._workers.servers is not None:  # the gradient may be on its way there
                self._workers.servers.drop(request.ticket)
            rows = abridged(self.job.plan.shard(step, shard))
            text = f"{reason}; it computed {self.job.place(step, shard)}, rows {rows}"
            ahead = self._workers.arena.loaded_ahead(worker)
            if ahead is not None and ahead != (step, shard):
                rows = abridged(self.job.plan.shard(*ahead))
                text += (
                    f", and loaded rows {rows} of {self.job.place(*ahead)} ahead: the one "
                    "or the other may be to blame"
                )
            self._lose(worker, WorkerError(text))
        self._ends[worker] += 1
        crashed = crashed and request is not None
        self.inbox.put(protocol.Left(worker, reason, crashed=crashed, results_stay=True))

    def answered(self, worker: int, answer: messages.Answer) -> None:
        """Take a worker's answer to a request.

        Results of several workers for a step that needs all shards may have been added before. The
        ends of these workers arrive after the sum.
        """
        group: list[tuple[int, messages.Answer]] = [(worker, answer), *answer.others]
        for number, own in group:
            request = self.requests.get(number)
            if request is None or request.ticket != own.ticket:
                return
        outcome = self._outcome(self.requests[worker], answer)
        for number, own in group:
            self.inbox.put(self._answered(number, outcome, own.spans))
            outcome = []

    def _outcome(self, request: Request, answer: messages.Answer) -> Outcome:
        if isinstance(answer, messages.ShardsCancelled):
            return None
        if isinstance(answer, messages.ShardFailed):
            return ShardFailure(answer.shard, answer.error)
        results: list[ShardSum] = []
        for own in answer.results:  # the result has the slot of its first shard now
            at = own.shares[0].shard - request.shard
            slot, request.slots[at] = request.slots[at], None
            results.append(_with_vectors(own, self._workers.arena, request.step, slot))
        if answer.is_held:
            results[0].gradient = RemoteGradient(request.step, answer.ticket)
        if answer.outputs:
            value = unpacked(answer.outputs[0], answer.memory)
            results[0].outputs = [Piece(request.step, request.shard, value)]
        if answer.others:
            results += (each for _, other in answer.others for each in other.results)
            return joined(results, self.job.plan.shards_of(request.step))
        return results

    # --- requests and slots -----------------------------------------------------------------------

    def _compute(self, effect: protocol.Compute) -> None:
        # After an end the coordinator hears of the end next, and deals the shard again.
        if not self._ends[effect.worker]:
            super()._compute(effect)

    def _request(self, effect: protocol.Compute, request: Request) -> None:
        workers, job, snapshot = self._workers, self.job, request.snapshot
        request.ticket = next(workers.tickets)
        has_slots = job.has_gradients(effect.step)
        slots = [heapq.heappop(self._free) if has_slots else None for _ in range(effect.count)]
        request.slots = slots
        if snapshot is None and isinstance(job, Training) and not self._is_shown:
            workers.arena.publish(workers.buffers)
            self._is_shown = True
        shards = range(effect.shard, effect.shard + effect.count)
        beside = [job.beside(effect.step, shard) for shard in shards]
        message = messages.ComputeShards(
            job=self.number,
            ticket=request.ticket,
            step=effect.step,
            shard=effect.shard,
            slots=slots,
            snapshot=snapshot and (snapshot.number, snapshot.version),
            rank_of=effect.rank_of,
            beside=beside if any(beside) else None,
        )
        if (handle := workers.supervisor.handle(effect.worker)) is None:
            return  # the end is heard of next
        if handle.place and snapshot is None:
            message.following = self._following(effect)
            if has_slots and effect.is_needed and workers.servers is None:  # servers add themselves
                message.leaves = job.plan.shards_of(effect.step)
        handle.post_with(workers.model_changes(), message)

    def _following(self, effect: protocol.Compute) -> tuple[int, int] | None:
        """Return step and shard that the worker is likely to compute next; None if unknown."""
        job, step = self.job, effect.step
        if type(job) not in (Training, Evaluation):
            return None
        later = [s for s in job.home_shards(effect.rank_of, step) if s > effect.shard]
        if not later and isinstance(job, Evaluation) and step + 1 in job.steps:
            step += 1
            later = [*job.home_shards(effect.rank_of, step)]
        return (step, later[0]) if later else None

    def _decided(self, worker: int) -> None:
        """Do nothing: results are added in ``receive``."""

    def _cancel(self, worker: int, request: Request) -> None:
        self._workers.arena.cancelled[worker] = request.ticket
        if (handle := self._workers.supervisor.handle(worker)) is not None:
            handle.cancel(request.ticket)

    def _replace(self, worker: int, reason: str) -> None:
        self._workers.supervisor.kill(worker, reason)

    def _end(self, worker: int) -> Request:
        request = super()._end(worker)
        self._give_back(request.slots)
        return request

    def _recycle(self, result: ShardSum) -> None:
        assert isinstance(result, SlotSum)
        self._give_back([result.slot])
        result.slot = None

    def _give_back(self, slots: Sequence[int | None]) -> None:
        for slot in slots:
            if slot is not None:
                heapq.heappush(self._free, slot)


def _with_vectors(sent: SlotSum, arena: Arena, step: int, slot: int | None) -> SlotSum:
    """Return the result of a shard, as sent by a worker, with the vectors of its slot.

    Args:
        slot: None: the shard has no vectors.

    Raises:
        WorkerError: the message names rows that the gradient cannot have.
    """
    sent.slot = slot
    if slot is None or sent.awaits_totals:
        return sent
    vectors = arena.slot(slot)
    sent.gradient, sent.written = vectors.flat, vectors.written
    sent.buffers = vectors.floats if vectors.floats.numel() else None
    sent.integer_buffers = vectors.integer_buffers if vectors.integer_buffers.numel() else None
    if arena.parameters.layout.by_rows:
        sent.gradient.rows = sent.rows
        for name, rows in sent.rows.items():
            parameter = arena.parameters.views.get(name)
            fault = "nobody has it" if parameter is None else rows.fault(parameter)
            if fault is not None:
                shard, worker, *_ = sent.shares[0]
                raise WorkerError(
                    f"worker {worker} said of step {step}, shard {shard}, gradient of {name!r}: "
                    f"{fault}; this is a damaged message: please report it"
                )
    return sent
