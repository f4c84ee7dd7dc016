"""The stage runner: computes the stages of one device, in the order of the schedule.

A device is a process or a thread (``stage_devices.py``), with the same rows, links and sums. In a
process the replica is the process's copy; in a thread the device has a replica of its own.

A process is a fork of the process with the replica, made after the first shard: the fork has the
model, the loss function and all reachable objects. A fork owns nothing that matters, and is killed
with the parent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from mmap import mmap
from typing import Any, NamedTuple

import torch

from quorate.coordination.pipeline_schedules import Row, Work
from quorate.coordination.tree import PlacedShard
from quorate.engines import remote_error
from quorate.engines.remote_error import exited
from quorate.engines.stages.links import PARENT, StageLinks, serve_parent
from quorate.replica.beside.at import At
from quorate.replica.device_generators import AloneOn
from quorate.replica.flat import Flat
from quorate.replica.loss_terms import Scales
from quorate.replica.pipeline.buffers import BufferSetter
from quorate.replica.pipeline.on_devices.device_stream import DeviceStream
from quorate.replica.pipeline.routes import StageRoute
from quorate.replica.pipeline.stage import BackwardResults, Stage, StageComputing
from quorate.replica.pipeline.stage_graph import StageGraph
from quorate.replica.replica import Phase, Replica
from quorate.replica.streams import Stream
from quorate.replica.transfer import move


def no_stage(_stage: int) -> None:
    """Ignore a late stage."""


class MicroBatch(NamedTuple):
    """The rows of one shard, as sent to each stage."""

    data: Any  # on the host
    at: At  # the position of the rows in the run
    rows: int
    seed: int
    scales: Scales | None = None  # of terms of the loss, see ``Replica.gradient``


class ShardInput(NamedTuple):
    """One shard of a run, for a pipelined replica."""

    shard: int  # its number in its step
    batch: MicroBatch
    into: Flat | None  # as for ``Replica.gradient``
    on_phase: Phase
    waits_for: Callable[[int], None] = no_stage  # called with a stage that takes long


_Shard = tuple[int, int]  # a stage, and a shard of a run


def device_of(stage: int, devices: int) -> int:
    """Return the device of a stage: stages are dealt in turn."""
    return stage % devices


class StageRunner:
    """The stages of a device, with the links to the parent and all devices.

    Args:
        device: the device, with links to the parent and to all devices.
        stages: of the device, by number.
        gradients: shared memory for sums of shards, by place.
        turn: entered while the device computes, and left while the device waits.
    """

    def __init__(
        self,
        device: StageDevice,
        stages: Mapping[int, Stage],
        gradients: Sequence[Flat],
        turn: AbstractContextManager[Any],
    ) -> None:
        self._device, self._links = device, device.links
        self._stages, self._gradients, self._turn = stages, gradients, turn
        self._batches: list[MicroBatch] = []
        self._puts: Sequence[PlacedShard] = ()
        self._parts: dict[tuple[int, int], Flat] = {}  # of a stage, by stage and place
        self._answers: dict[_Shard, dict[str, Any]] = {}  # of shards on their way
        self._begun: dict[_Shard, BackwardResults] = {}  # first parts of passes in two parts
        self.at: _Shard = (0, 0)
        self._began = 0.0  # when the input of the present work was there, by the monotonic clock

    def run(self, row: Row, puts: Sequence[PlacedShard]) -> None:
        """Compute the device's row of a run of shards; the batches arrive meanwhile.

        Args:
            puts: place and additions of the gradient of each shard, in the order of the backward
                passes.
        """
        self._batches, self._puts = [], puts
        for work, stage, shard in row:
            self.at = (stage, shard)
            self._device.note(stage, computes=True)
            self._began = time.monotonic()
            if work is Work.FORWARD:
                self._take_batches(shard + 1)
                self._forward(self._stages[stage], shard)
            elif work is Work.BACKWARD_WEIGHT:
                self._complete(self._stages[stage])
            else:
                self._backward(self._stages[stage], work)
        self._device.note(self.at[0], computes=False)
        self._take_batches(len(puts))

    def _take_batches(self, count: int) -> None:
        while len(self._batches) < count:
            self._batches.append(self._links.take("batch")[1])

    def _forward(self, stage: Stage, shard: int) -> None:
        batch = self._batches[shard]
        receive = partial(self._receive, "forward", stage.route.forward_from)
        with self._turn:
            given = stage.forward(shard, batch, batch.rows, batch.seed, receive)
        self._send("forward", given.to)
        answer: dict[str, Any] = {"buffers": given.buffers, "spans": {}}
        if (outcome := given.outcome) is not None:
            answer |= {"weight": outcome.weight, "metrics": outcome.weighted()}
            answer |= {"totals": outcome.totals, "denominators": outcome.denominators}
            answer["multiplier"] = outcome.multiplier
        self._answers[self.at] = answer
        self._note_span(Work.FORWARD)

    def _backward(self, stage: Stage, work: Work) -> None:
        receive = partial(self._receive, "backward", stage.route.back_from)
        is_first_part = work is Work.BACKWARD_INPUT
        with self._turn:
            back = stage.backward(self.at[1], receive, is_first_part=is_first_part)
        self._send("backward", back.to)
        if is_first_part:
            self._begun[self.at] = back._replace(to={})  # its values are sent
            self._note_span(work)
        else:
            self._finish(stage, back, work)

    def _complete(self, stage: Stage) -> None:
        with self._turn:
            back = stage.complete(self._begun.pop(self.at))
        self._finish(stage, back, Work.BACKWARD_WEIGHT)

    def _finish(self, stage: Stage, back: BackwardResults, work: Work) -> None:
        """Add a shard's gradient to the sums, and send the parent the answer."""
        put = self._puts[self.at[1]]
        self._part(stage, put.place).fill(back.gradients, back.weight)
        for left, right in put.additions:
            self._part(stage, left).add_(self._part(stage, right))
        self._note_span(work)
        answer = {**self._answers.pop(self.at), "has": sorted(back.gradients)}
        self._links.send(PARENT, ("done", *self.at), answer)

    def _note_span(self, work: Work) -> None:
        """Note begin and end of the present work, by the monotonic clock."""
        self._answers[self.at]["spans"][work.value] = (self._began, time.monotonic())

    def _part(self, stage: Stage, place: int) -> Flat:
        """Return the parameters of a stage in a vector of sums."""
        key = (stage.graph.index, place)
        if key not in self._parts:
            self._parts[key] = self._gradients[place].part(stage.route.owned)
        return self._parts[key]

    def _receive(self, direction: str, senders: Sequence[int]) -> list[Any]:
        """Return the values of some stages for the present work. Blocks, and counts as waiting."""
        stage, shard = self.at
        self._device.note(stage, computes=False)
        # A stage without senders does not wait, and keeps the turn.
        with self._outside_turn() if senders else nullcontext():
            keys = [(direction, sender, stage, shard) for sender in senders]
            values = [self._links.take(key)[1] for key in keys]
        self._device.note(stage, computes=True)
        self._began = time.monotonic()
        return values

    @contextmanager
    def _outside_turn(self) -> Iterator[None]:
        """Leave the turn to the remaining devices within the block."""
        self._turn.__exit__(None, None, None)
        try:
            yield
        finally:
            self._turn.__enter__()

    def _send(self, direction: str, values: Mapping[int, Any]) -> None:
        """Send stages the values of the present work."""
        stage, shard = self.at
        for to, value in values.items():
            key, device = (direction, stage, to, shard), device_of(to, self._device.devices)
            if device == self._device.number:
                self._links.put(key, value)
            else:
                self._links.send(device, key, value)


_WORD_BYTES = 8


class StageActivity:
    """The stage of each device, in memory shared with forks that are made later.

    A device may be killed or stopped anywhere: no word is ever locked, and nobody waits for a word.

    Args:
        devices: number of devices.
    """

    def __init__(self, devices: int) -> None:
        # 2 * stage + 1: a device computes; 2 * stage: a device waits for the stage's turn. Native
        # words of a memoryview are written and read as a whole; struct works byte by byte.
        self._words = memoryview(mmap(-1, _WORD_BYTES * max(1, devices))).cast("q")
        for device in range(devices):
            self.note(device, device, computes=False)

    def note(self, device: int, stage: int, *, computes: bool) -> None:
        """Note that a device begins to compute, or to wait for the input of a stage."""
        self._words[device] = 2 * stage + computes

    def read(self, device: int) -> tuple[int, bool]:
        """Return the stage of a device, and whether the device computes."""
        word = self._words[device]
        return word // 2, bool(word % 2)


class StageDevice(NamedTuple):
    """One of the devices of a replica, as its process or thread sees the device."""

    number: int
    devices: int  # number of devices
    links: StageLinks  # to the parent and all devices
    activity: StageActivity  # of all devices

    def note(self, stage: int, *, computes: bool) -> None:
        """Note that the device begins to compute, or to wait for the input of a stage."""
        self.activity.note(self.number, stage, computes=computes)


class StagedReplica(Replica):
    """A replica that can compute stages of its model."""

    def serve(
        self,
        graphs: Sequence[StageGraph],
        plan: Sequence[StageRoute],
        gradients: Sequence[Flat],
        device: StageDevice,
    ) -> None:
        """Be a device, until the parent closes the links.

        Args:
            graphs: all stages.
            plan: the route of each stage.
            gradients: shared memory for sums of shards, by place.
            device: to be.
        """
        with self._on_stage() as stream, self._computing.products():
            computing = StageComputing(
                self.model, self._trainable, self._begin_in_stage, self._read_in_stage, stream
            )
            stages = {
                graph.index: Stage(graph, route, computing)
                for graph, route in zip(graphs, plan, strict=True)
                if device_of(graph.index, device.devices) == device.number
            }
            # Generators are the devices': two stages on one GPU queue their kernels in turn.
            runner = StageRunner(device, stages, gradients, AloneOn(self.group))

            def compute(run: Any) -> None:
                row, puts, buffers, values = run
                if values is not None:
                    self.loss_call.shared.take(values)
                self._restore(buffers)
                with self.loss_call.shared.reading():
                    runner.run(row, puts)

            def describe(error: BaseException) -> Any:
                stage, shard = runner.at
                if isinstance(error, SystemExit):  # raised by user code: jobs' signals are ignored
                    error = exited(error, f"stage {stage}, shard {shard} of a run")
                return stage, remote_error.to_json(error)

            serve_parent(device.links, "run", compute, describe)

    @contextmanager
    def _on_stage(self) -> Iterator[Stream | DeviceStream]:
        """Within the block the calling thread computes stages; yields its random stream."""
        with Stream() as stream:
            yield stream

    def _restore(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Have the shards of a run begin with these values of buffers, as far as they are here."""
        own = dict(self.model.named_buffers())
        here = {name: b for name, b in buffers.items() if own[name].device.type != "meta"}
        self._set_pulled = BufferSetter(self.model, move(here, self.device))

    def _begin_in_stage(self, stream: Any, seed: int) -> None:
        self._begin(stream, seed, training=True)

    def _read_in_stage(self, batch: MicroBatch, rows: int) -> Any:
        self.loss_call.at = batch.at
        data = move(batch.data, self.device)
        with self.alone.modes_put_back():
            return self._read(self.loss_call.loss, data, rows, training=True, scales=batch.scales)
