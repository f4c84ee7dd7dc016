"""The loop of a worker process: carries out the coordinator's requests in order.

Parameters and results are in the arena. A request names the slots of the results, and an answer has
the ticket of its request.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from quorate.data.feed import Feed
from quorate.data.source import Source, Ticket
from quorate.engines.job import Job, class_of, data_fingerprint, probe_fingerprint
from quorate.engines.model_changes import ModelChanges
from quorate.engines.processes import worker_messages as messages
from quorate.engines.processes.arena import Arena
from quorate.engines.processes.wire import Wire
from quorate.engines.processes.worker_messages import SlotSum
from quorate.engines.shard_runner import ShardFailure, ShardRunner
from quorate.machine.devices import Group
from quorate.machine.shared_memory import Segment
from quorate.replica.beside.values import NO_VALUES
from quorate.replica.computing import Computing
from quorate.replica.notes import Notes
from quorate.replica.outputs import parcel
from quorate.replica.replica import Replica
from quorate.replica.shard_sum import ShardSum
from quorate.replica.snapshots import Snapshot, VectorSet
from quorate.replica.streams import Stream


@dataclass(frozen=True, kw_only=True)
class WorkerProgram:
    """Everything of a worker process from the script instead of the coordinator.

    Functions and datasets cannot travel between processes, so each worker makes its own by running
    the script. Parameters, the order of rows and requests come from the coordinator.
    """

    model: torch.nn.Module
    group: Group  # the worker's devices
    threads: int  # intra-op
    computing: Computing  # before the coordinator's decisions
    notes: Notes  # of everything that the worker makes
    # From the coordinator's name of a dataset, a plan as JSON, and whether rows are augmented.
    new_source: Callable[[str, dict[str, Any], bool], Source]
    new_replica: Callable[[Arena, Mapping[str, Any]], Replica]  # from the coordinator's decisions


@dataclass
class _JobWithFeed:
    """An open job, with the feed of this worker's home shards."""

    job: Job
    rank_of: tuple[int, int] | None = None  # of the feed
    feed: Feed | None = None

    def close(self) -> None:
        if self.feed is not None:
            self.feed.close()
            self.feed = None


class WorkerLoop:
    """The jobs of a worker process, and the shards computed for the jobs.

    Args:
        number: of the worker.
        wire: receives the answers.
        arena: has the parameters, and slots for results.
        replica: computes.
        program: model, loss and data of the script.
    """

    def __init__(
        self, number: int, wire: Wire, arena: Arena, replica: Replica, program: WorkerProgram
    ) -> None:
        self._number = number
        self._wire = wire
        self._arena = arena
        self._replica = replica
        self._program = program
        self._jobs: dict[int, _JobWithFeed] = {}
        self._sheet = arena.sheets[number]
        self._runner = ShardRunner(number, replica, self._sheet, lambda: arena.frozen.views)
        self._shared = NO_VALUES

    def handle(self, request: messages.WorkerMessage, stream: Stream) -> bool:
        """Carry out a request, and send the answer; return False if the process is to end.

        Blocks for as long as a shard takes.
        """
        if isinstance(request, messages.ModelRequest):
            self._change_model(request)
        match request:
            case messages.OpenJob():
                self._open(request, stream)
            case messages.ComputeShards():
                self._compute(request, stream)
                self._sheet.tell("waiting")
                if (feed := self._jobs[request.job].feed) is not None:
                    feed.load_following()  # while the coordinator is at work
            case messages.CloseJob():
                self._jobs.pop(request.job).close()
            case _:
                return False
        return True

    def _change_model(self, request: messages.ModelRequest) -> None:
        """Make user code's changes, and take new values of ``Shared``, for all later shards."""
        if request.model_changes is not None:
            self._runner.changes.take(ModelChanges.from_json(request.model_changes))
        if (sent := request.shared) is not None:
            if sent["tensors"] is None:
                self._shared = self._shared.from_json(sent)
            else:
                self._shared = self._shared.mapped(sent, self._wire.fds.pop(0))
            self._replica.loss_call.shared.take(self._shared)

    def _open(self, request: messages.OpenJob, stream: Stream) -> None:
        kind = class_of(request.work, Job)
        parameters = self._arena.average if request.averaged else self._arena.parameters
        assert request.dataset is not None
        assert parameters is not None
        source = self._program.new_source(request.dataset, request.plan, kind.augments)
        job = kind(source, parameters, range(*request.steps), **request.options)
        job.traced = range(*request.traced)
        self._jobs[request.job] = _JobWithFeed(job)
        answer = messages.JobReady(request.job)
        start = self._wire.fds.pop(0) if request.compares_gradient else None
        try:
            if request.compares_data:
                answer.data = data_fingerprint(source)
        except Exception:
            pass  # the edge of user code: the shard raises again, and is reported then
        try:
            if start is not None:
                answer.gradient = self._gradient(start, source, stream)
        except Exception as error:  # the coordinator computes the same shard without an error
            answer.error = error
        self._wire.send(answer)

    def _gradient(self, start: int, source: Source, stream: Stream) -> str:
        """Return the fingerprint of a gradient from the parameters at the start of the run."""
        segment = Segment(os.fstat(start).st_size, start)
        values = self._arena.slot_in(segment, of_parameters=True)
        self._replica.pull(values.flat, version=segment, set_buffers=values.set)
        try:
            return probe_fingerprint(self._replica, source, stream)
        finally:
            # The parameters of the start would stay mapped otherwise.
            self._replica.pull(self._arena.parameters, version=None)

    def _feed(self, open_job: _JobWithFeed, rank_of: tuple[int, int], first: Ticket) -> Feed:
        """Return rows of the home shards of a rank; a new feed after workers have come or gone."""
        if open_job.feed is None or rank_of != open_job.rank_of:
            open_job.close()
            told = partial(self._arena.loads_ahead, self._number)
            open_job.feed = open_job.job.feed(rank_of, first, self._replica.device, told)
            open_job.rank_of = rank_of
        return open_job.feed

    def _compute(self, request: messages.ComputeShards, stream: Stream) -> None:
        step, first, ticket = request.step, request.shard, request.ticket
        open_job, snapshot = self._jobs[request.job], request.snapshot
        slots = [None if slot is None else self._arena.slot(slot) for slot in request.slots]
        results = self._runner.run(
            open_job.job,
            lambda: self._feed(open_job, request.rank_of, (step, first)),
            stream,
            step,
            first,
            [None if slot is None else slot.flat for slot in slots],
            # A ticket belongs to a single request, so a late cancellation has no effect.
            is_cancelled=lambda: self._arena.is_cancelled(self._number, ticket),
            beside=request.beside,
            snapshot=snapshot and Snapshot(self._arena.slot(snapshot[0]), *snapshot),
            is_only=True,
        )
        spans = self._sheet.recorded(cuts=True)
        about: dict[str, Any] = {"job": request.job, "ticket": ticket, "spans": spans}
        if results is None:
            self._wire.send(messages.ShardsCancelled(**about))
            return
        if isinstance(results, ShardFailure):
            self._wire.send(messages.ShardFailed(*results, **about))
            return
        for result in results:
            if (into := slots[result.shares[0].shard - first]) is not None:
                _put(result, into)
        answer = messages.ShardsDone([_without_vectors(result) for result in results], **about)
        fds = []
        if results[0].outputs:
            (piece,) = results[0].outputs  # evaluations and predictions are never dealt in runs
            description, memory = parcel.packed(piece.value)
            answer.outputs = [description]
            if memory is not None:
                answer.memory, fds = True, [memory.fd]
        self._wire.send(answer, fds)


def _put(result: ShardSum, into: VectorSet) -> None:
    """Copy buffers and written parameters of a result into the slot; the gradient is there."""
    if result.buffers is not None:
        into.floats.copy_(result.buffers)
    if result.integer_buffers is not None:
        into.integer_buffers.copy_(result.integer_buffers)
    if into.written is not None and result.written is not None:
        into.written.copy_(result.written)


def _without_vectors(result: ShardSum) -> SlotSum:
    """Return the result of a shard without the vectors of the slot."""
    return SlotSum(
        result.weight,
        result.metrics,
        missing=result.missing,
        shares=result.shares,
        totals=result.totals,
        represented=result.represented,
        rows={} if result.gradient is None else result.gradient.rows,
        denominators=result.denominators,
    )
