"""A worker's loop: carries out what the coordinator asks for, one message at a time, in order.

The large things are in the arena; messages say which slot of it, and which ticket an answer has.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch

from quorate.coordination.plan import from_json
from quorate.data.feed import Feed
from quorate.data.loader_processes import Told
from quorate.data.source import Source, length
from quorate.engines.fingerprints import data_fingerprint, probe_fingerprint
from quorate.engines.job import Job, class_of
from quorate.engines.messages import Message
from quorate.engines.model_changes import ModelChanges, ModelChangesReceiver
from quorate.engines.processes.arena import Arena
from quorate.engines.processes.program import Program
from quorate.engines.processes.wire import Wire
from quorate.engines.shard_runner import ShardFailure, ShardRunner
from quorate.errors import UserError
from quorate.machine.shared_memory import Segment
from quorate.replica.beside.values import NO_VALUES
from quorate.replica.outputs import parcel
from quorate.replica.replica import Replica
from quorate.replica.shard_sum import ShardSum
from quorate.replica.snapshots import Snapshot, Vectors
from quorate.replica.streams import Stream
from quorate.replica.totals import packed_totals


class _OpenJob:
    """A job that is open, and the rows that are fetched for it."""

    def __init__(self, job: Job, moves_to: torch.device, told: Told) -> None:
        self.job = job
        self._told = told
        self._moves_to = moves_to
        self._rank_of: tuple[int, int] | None = None
        self._feed: Feed | None = None

    def feed(self, rank_of: tuple[int, int], step: int, shard: int) -> Feed:
        """Return rows of this rank's home shards; a new feed when workers have come or gone."""
        if self._feed is None or rank_of != self._rank_of:
            self.close()
            self._feed = self.job.feed(rank_of, (step, shard), self._moves_to, self._told)
            self._rank_of = rank_of
        return self._feed

    def load_following(self) -> None:
        """Load the rows that are likely to be wanted next, while the coordinator is at work."""
        if self._feed is not None:
            self._feed.load_following()

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()
            self._feed = None


class ShardLoop:
    """A worker's side of all jobs: which are open, and what is computed for them.

    Args:
        number: of the worker.
        wire: takes the answers.
        arena: where parameters are read and results are written.
        replica: computes.
        program: what the script made.
    """

    def __init__(
        self, number: int, wire: Wire, arena: Arena, replica: Replica, program: Program
    ) -> None:
        self._number = number
        self._wire = wire
        self._arena = arena
        self._replica = replica
        self._program = program
        self._jobs: dict[int, _OpenJob] = {}
        self._sheet = arena.sheets[number]
        self._runner = ShardRunner(number, replica, self._sheet)
        self._shared = NO_VALUES
        self._changes_receiver = ModelChangesReceiver(replica, lambda: arena.frozen.views)

    def handle(self, message: Message, stream: Stream) -> None:
        """Carry out a message, and answer it. Blocks for as long as a shard takes."""
        if "amendments" in message:
            self._changes_receiver.take(ModelChanges.from_json(message["amendments"]))
        if "shared" in message:
            self._take_shared(message["shared"])
        match message["kind"]:
            case "open":
                self._open(message, stream)
            case "compute":
                self._compute(message, stream)
                self._sheet.tell("waiting")
                self._jobs[message["job"]].load_following()
            case "close":
                self._jobs.pop(message["job"]).close()

    def _take_shared(self, sent: dict[str, Any]) -> None:
        """Take what user code set of ``Shared``: what is dealt from now on is computed with it."""
        if sent["tensors"] is None:
            self._shared = self._shared.from_json(sent)
        else:
            self._shared = self._shared.mapped(sent, self._wire.fds.pop(0))
        self._replica.called.shared.take(self._shared)

    def _open(self, message: Message, stream: Stream) -> None:
        name, program = message["dataset"], self._program
        plan = from_json(message["plan"], program.order, program.sampling)
        dataset = self._program.datasets[name]
        if (rows := length(dataset)) != plan.rows:
            raise UserError(
                f"a worker that ran the script again made another {name}",
                got=f"{rows} rows",
                expected=f"{plan.rows} as in the coordinator",
                fix="make the script repeatable, or use engine='towers'",
            )
        kind = class_of(message["work"], Job)
        parameters = self._arena.average if message["averaged"] else self._arena.parameters
        assert parameters is not None
        augment = self._program.augment if kind.augments else None
        source = Source(dataset, plan, self._program.collates[name], augment)
        job = kind(source, parameters, range(*message["steps"]), **message["options"])
        job.traced = range(*message["traced"])
        told = partial(self._arena.loads_ahead, self._number)
        self._jobs[message["job"]] = _OpenJob(job, self._replica.device, told)
        answer: Message = {"kind": "ready", "job": message["job"]}
        start = self._wire.fds.pop(0) if "gradient" in message["checks"] else None
        try:
            if "data" in message["checks"]:
                answer["data"] = data_fingerprint(source)
        except Exception:
            pass  # the edge of user code: it raises again in its shard, where it is reported
        try:
            if start is not None:
                answer["gradient"] = self._gradient(start, source, stream)
        except Exception as error:  # the coordinator has computed it
            answer["error"] = error
        self._wire.send(answer)

    def _gradient(self, start: int, source: Source, stream: Stream) -> str:
        """Compute what this worker is compared by, from parameters as they were at the start."""
        segment = Segment(os.fstat(start).st_size, start)
        values = self._arena.slot_in(segment, of_parameters=True)
        self._replica.pull(values.flat, version=segment, set_buffers=values.set)
        try:
            return probe_fingerprint(self._replica, source, stream)
        finally:
            # Else they would stay mapped.
            self._replica.pull(self._arena.parameters, version=None)

    def _compute(self, message: Message, stream: Stream) -> None:
        number, step, first = (message[name] for name in ("job", "step", "shard"))
        ticket, snapshot = message["ticket"], message["snapshot"]
        open_job = self._jobs[number]
        answer: Message = {"job": number, "ticket": ticket}
        slots = [
            None if slot is None else self._arena.slot(slot)
            for slot in (message["slot"], *message.get("more", ()))
        ]
        results = self._runner.run(
            open_job.job,
            lambda: open_job.feed(tuple(message["rank_of"]), step, first),
            stream,
            step,
            first,
            [None if slot is None else slot.flat for slot in slots],
            # The coordinator cancels a ticket, which no other shard will ever have, so that a
            # cancellation that comes late means nothing.
            is_cancelled=lambda: bool(self._arena.cancelled[self._number] == ticket),
            beside=message.get("beside"),
            snapshot=snapshot and Snapshot(self._arena.slot(snapshot[0]), *snapshot),
            is_only=True,
        )
        if (spans := self._sheet.recorded(cuts=True)) is not None:
            answer["spans"] = spans
        if results is None:
            self._wire.send({"kind": "left off", **answer})
            return
        if isinstance(results, ShardFailure):
            self._wire.send({"kind": "failed", **answer, **results._asdict()})
            return
        for result, into in zip(results, slots, strict=True):
            if into is not None:
                _put(result, into)
        answer |= _said(results[0])
        if len(results) > 1:
            answer["more"] = [_said(result) for result in results[1:]]
            if slots[0] is not None and any(result.gradient is None for result in results):
                answer["sums"] = True  # a replica in stages adds the gradients of each subtree
        fds = []
        if results[0].outputs:
            (piece,) = results[0].outputs  # evaluations and predictions are never dealt in runs
            answer["outputs"], memory = parcel.packed(piece.value)
            if memory is not None:
                answer["memory"], fds = True, [memory.fd]
        self._wire.send({"kind": "done", **answer}, fds)


def _put(result: ShardSum, into: Vectors) -> None:
    """Put what a shard yields beside its gradient into its slot."""
    if result.buffers is not None:
        into.floats.copy_(result.buffers)
    if result.integer_buffers is not None:
        into.integer_buffers.copy_(result.integer_buffers)
    if into.written is not None and result.written is not None:
        into.written.copy_(result.written)


def _said(result: ShardSum) -> Message:
    """Return what is said of a shard that is done."""
    said: Message = {
        "weight": result.weight,
        "metrics": result.metrics,
        "missing": None if result.missing is None else sorted(result.missing),
        "totals": packed_totals(result.totals),
    }
    if result.represented:
        said["represented"] = result.represented
    if result.gradient is not None and result.gradient.rows:
        said["rows"] = result.gradient.rows
    return said
