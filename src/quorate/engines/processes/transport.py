"""Worker processes: shared memory for tensors, and a socket each for small messages.

A pool starts the script again in each of them. Results of a worker that ends stay in shared memory.
This module has the jobs, each with its channel, and the memory. The supervisor (``supervisor.py``)
watches over processes, and ``agreement.py`` compares each worker with the coordinator.

Requests travel as messages, and results lie in slots of the arena. A worker has the slot of a shard
until the worker has answered or ended; afterwards the coordinator has the slot until the update of
the shard's step. A request has a ticket, and so has the answer.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from selectors import DefaultSelector
from typing import Any

from quorate.coordination import protocol
from quorate.coordination.plan import abridged
from quorate.engines import Transport, selection
from quorate.engines.job import Evaluation, Job, Training, class_name, place
from quorate.engines.job_channel import JobChannel, Request, StepSums
from quorate.engines.model_changes import ModelChanges
from quorate.engines.processes import worker_messages as messages
from quorate.engines.processes.agreement import Agreement
from quorate.engines.processes.arena import Arena
from quorate.engines.processes.pool import LocalPool, WorkerHandle, WorkerPool
from quorate.engines.processes.script import Script
from quorate.engines.processes.supervisor import Supervisor
from quorate.engines.processes.wire import Alarm
from quorate.engines.processes.worker_messages import SlotSum
from quorate.engines.servers import RemoteGradient, Servers
from quorate.engines.shard_runner import Outcome, ShardFailure, join_results
from quorate.engines.worker_status import Doing, WorkerStatus
from quorate.engines.workers import Workers
from quorate.errors import WorkerError
from quorate.machine.limits import FIRST_WORKERS_S
from quorate.replica.notes import Notes
from quorate.replica.outputs.parcel import unpacked
from quorate.replica.outputs.rows import Piece
from quorate.replica.shard_sum import ShardSum
from quorate.replica.snapshots import Snapshots


class Processes:
    """A worker process per entry of devices, on this machine or on a Ray cluster.

    Args:
        script: the script that workers run.
        workers: the settings.
        agreement: compares workers with the coordinator, and has the shared memory.
        model_changes: returns user code's changes of the model.
        decided: how workers compute, as far as the coordinator found out; see ``Computing``.
        timeout_s: how long a worker may take to reach the training loop, and to answer there.
        notes: collects the workers' notes.
        handler: the ``class_name`` of a ``SliceHandler``, if servers may own the parameters.

    Raises:
        UserError: the machine or the cluster lacks a resource.
        WorkerError: a process cannot be started.
    """

    can_replace = True

    def __init__(
        self,
        script: Script,
        workers: Workers,
        agreement: Agreement,
        model_changes: Callable[[], ModelChanges],
        *,
        decided: Mapping[str, Any],
        timeout_s: float,
        notes: Notes,
        handler: str | None = None,
    ) -> None:
        self.arena = arena = agreement.arena
        self.buffers = agreement.buffers
        self.tickets: Iterator[int] = itertools.count()
        self.channels: dict[int, ProcessesChannel] = {}  # by the job's number
        self.agreement = agreement
        self._timeout_s = timeout_s
        self._notes = notes
        self.model_changes = model_changes
        self._decided = decided
        self._description = arena.handed_over()
        self._opened_jobs = 0
        # What is open is closed in the opposite order, also when the rest cannot be opened.
        with ExitStack() as opened:
            try:
                selector = opened.enter_context(DefaultSelector())
                self._alarm = opened.enter_context(closing(Alarm(selector)))
                if workers.engine == selection.RAY:
                    from quorate.engines.ray.pool import RayPool  # imports Ray, which is an extra

                    pool: WorkerPool = RayPool(script, arena, workers, self.wake, handler)
                else:
                    pool = LocalPool(script, len(agreement.groups), threads=workers.threads)
                opened.callback(pool.close)
                if (servers := pool.servers) is not None:
                    places = enumerate(servers.where)
                    each = ", ".join(f"server {n} on {where}" for n, where in places)
                    agreement.say(f"{servers.count} slices of the parameters: {each}")
                self.servers = servers
                self.takes_runs = pool.takes_runs and arena.takes_runs
                devices = [str(group) for group in agreement.groups]
                edited_file = partial(script.changed, script.sources())
                told = (devices, timeout_s, agreement.say, edited_file)
                self.supervisor = Supervisor(pool, self, selector, *told)
                opened.enter_context(closing(self.supervisor)).start()
            except OSError as error:
                raise WorkerError(f"workers cannot be started: {error}") from error
            self._opened = opened.pop_all()

    def can_compute(self, dataset: object) -> bool:
        """Return whether workers had this dataset when they came to the loop."""
        return self.agreement.name_of(dataset) is not None

    def open(self, job: Job) -> ProcessesChannel:
        """Return a job's channel. Workers are invited with its first ``receive``."""
        self._opened_jobs += 1
        channel = ProcessesChannel(self, job, self._opened_jobs)
        self.channels[channel.number] = channel
        return channel

    def begin(self, channel: ProcessesChannel) -> None:
        """Begin a channel's job. Blocks for the shard that workers are compared with."""
        job, number, gather_s = channel.job, channel.number, None
        is_first = number == 1 and isinstance(job, Training)
        # A coordinator whose own results are not repeatable, as was said, cannot be compared.
        self.agreement.expect(job, is_first=is_first and not self._notes.doubts)
        if is_first:
            # A user who wants to know the differences wants all workers to take part.
            gather_s = FIRST_WORKERS_S if job.is_compared else self._timeout_s
        self.arena.publish(self.buffers)
        self.supervisor.open(number, gather_s=gather_s)

    def forget(self, channel: ProcessesChannel) -> None:
        """End a job."""
        del self.channels[channel.number]
        if channel.has_begun:
            self.supervisor.end(channel.number)

    def status(self) -> list[WorkerStatus]:
        """Return the status of each worker. Thread-safe."""
        rows = []
        for life in self.supervisor.workers:
            handle = self.supervisor.handle(life.number)
            pid = None if handle is None else handle.pid
            doing = self.arena.sheets[life.number].read()
            host = None if handle is None else handle.host
            where = host, host is not None
            rows.append(WorkerStatus(life.number, life.devices, pid, None, *doing, *where))
        return rows

    def wake(self) -> None:
        """End a ``pump``. Any thread, also a signal handler, may."""
        self._alarm.ring()

    def close(self) -> None:
        """End all workers: idle workers end at once, the rest is killed."""
        self._opened.close()

    # --- what the supervisor calls ----------------------------------------------------------------

    def welcome(self, worker: WorkerHandle) -> None:
        """Send the shared memory to a worker at the training loop."""
        self.arena.loads_ahead(worker.number, None)
        description, fds = self._description
        worker.post(messages.ShareMemory(dict(self._decided), description), *fds)

    def invite(self, worker: WorkerHandle, job: int) -> None:
        """Ask a worker to join a job, and for facts by which the two are compared.

        The worker answers ``JobReady``.
        """
        own = self.channels[job].job
        compares_data, start = self.agreement.checks(own, worker.comparison)
        request = messages.OpenJob(
            job=job,
            work=class_name(type(own)),
            averaged=own.parameters is self.arena.average,
            plan=own.plan.to_json(),
            steps=(own.steps.start, own.steps.stop),
            options=own.options(),
            traced=(own.traced.start, own.traced.stop),
            dataset=self.agreement.name_of(own.source.dataset),
            compares_data=compares_data,
            compares_gradient=start is not None,
        )
        fds = () if start is None else (start.fd,)
        worker.post_with(self.model_changes(), request, *fds)

    def accepts(self, worker: WorkerHandle, answer: messages.JobReady) -> bool:
        """Return whether a ready worker may join; invite a doubtful worker once more."""
        channel = self.channels.get(answer.job)
        if channel is None or self.agreement.check(
            channel.job, worker.comparison, answer, worker.number
        ):
            return True
        worker.post(messages.CloseJob(channel.number))
        self.invite(worker, channel.number)
        return False

    def receive(self, worker: int, message: messages.JobNews) -> None:
        """Take an answer to a request, or a note."""
        if isinstance(message, messages.FoundNote):
            self._notes.put(message.note)
            return
        if (channel := self.channels.get(message.job)) is not None:  # else the job is over
            channel.answered(worker, message)

    def is_computing(self, worker: int) -> bool:
        """Return whether a worker has a shard of any job."""
        return any(worker in channel.requests for channel in self.channels.values())

    def computing(self) -> frozenset[int]:
        """Return the workers at a shard whose time limit is the coordinator's affair.

        The coordinator looks after workers of the newest job: an evaluation interrupts the training
        loop. Workers of an interrupted job count until they are far behind their usual time.
        """
        newest = max(self.channels, default=0)
        return frozenset(
            worker
            for number, channel in self.channels.items()
            for worker in channel.requests
            if number == newest or not self.arena.sheets[worker].read().is_late
        )

    def last_shard(self, worker: int) -> tuple[Doing, str]:
        """Return a worker's last reported phase, and the shard in words."""
        doing = self.arena.sheets[worker].read()
        channels = [channel for _, channel in sorted(self.channels.items(), reverse=True)]
        own = [channel for channel in channels if worker in channel.requests]
        for channel in own or channels:
            return doing, channel.job.place(doing.step, doing.shard)
        return doing, place(Training.name, doing.step, doing.shard)

    def released(self, worker: int) -> None:
        """Mark a worker as starting: its process writes no more, and the next one not yet."""
        self.arena.sheets[worker].tell("starting")


def servers_of(workers: Transport) -> Servers | None:
    """Return the servers with the parameters of workers; None: the coordinator has them."""
    return workers.servers if isinstance(workers, Processes) else None


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
            return join_results(results, self.job.plan.shards_of(request.step))
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
