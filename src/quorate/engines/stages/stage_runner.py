"""The stage runner: computes the stages of one device, in the order of the schedule.

A device is a process or a thread (``stage_devices.py``), with the same rows, links and sums.

A process is a fork of the process with the replica, made after the first shard: the fork has the
model, the loss function and all reachable objects. A fork owns nothing that matters, and is killed
with the parent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from mmap import mmap
from typing import Any

import torch

from quorate.coordination.pipeline_schedules import Row, Work
from quorate.coordination.tree import PlacedShard
from quorate.engines.stages.links import PARENT, StageLinks
from quorate.engines.stages.shard_input import MicroBatch
from quorate.replica.flat import Flat, are_alike
from quorate.replica.pipeline.stage import Back, Stage

_Shard = tuple[int, int]  # a stage, and a shard of a run


def device_of(stage: int, devices: int) -> int:
    """Return the device of a stage: stages are dealt in turn."""
    return stage % devices


class StageRunner:
    """The stages of a device, with the links to the parent and all devices.

    Args:
        number: of the device.
        devices: number of devices.
        stages: of the device, by number.
        links: to the parent and all devices.
        gradients: shared memory for sums of shards, by place.
        activity: the record of all devices.
        turn: entered while the device computes, and left while the device waits.
    """

    def __init__(
        self,
        number: int,
        devices: int,
        stages: Mapping[int, Stage],
        links: StageLinks,
        gradients: Sequence[Flat],
        activity: StageActivity,
        turn: AbstractContextManager[Any],
    ) -> None:
        self._number, self._devices = number, devices
        self._stages = stages
        self._links = links
        self._gradients = gradients
        self._activity = activity
        self._turn = turn
        self._batches: list[MicroBatch] = []
        self._puts: Sequence[PlacedShard] = ()
        self._stretches: dict[tuple[int, int], list[torch.Tensor]] = {}  # by stage and place
        self._answers: dict[_Shard, dict[str, Any]] = {}  # of shards on their way
        self._begun: dict[_Shard, Back] = {}  # first parts of backward passes in two parts
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
            self._activity.computes(self._number, stage)
            self._began = time.monotonic()
            if work is Work.FORWARD:
                self._take_batches(shard + 1)
                self._forward(self._stages[stage], shard)
            elif work is Work.BACKWARD_WEIGHT:
                self._complete(self._stages[stage])
            else:
                self._backward(self._stages[stage], work)
        self._activity.waits(self._number, self.at[0])
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
            answer["totals"] = outcome.totals
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

    def _finish(self, stage: Stage, back: Back, work: Work) -> None:
        """Add a shard's gradient to the sums, and send the parent the answer."""
        put = self._puts[self.at[1]]
        self._write(stage, put.place, back)
        self._add(stage, put)
        self._note_span(work)
        answer = {**self._answers.pop(self.at), "has": sorted(back.gradients)}
        self._links.send(PARENT, ("done", *self.at), answer)

    def _note_span(self, work: Work) -> None:
        """Note begin and end of the present work, by the monotonic clock."""
        self._answers[self.at]["spans"][work.value] = (self._began, time.monotonic())

    @torch.no_grad()
    def _write(self, stage: Stage, place: int, back: Back) -> None:
        """Write the stage's part of a shard's weighted gradient, as ``Flat.fill`` does."""
        views = self._gradients[place].views
        for name in stage.route.owned:
            if (view := views.get(name)) is None:
                continue  # the parameter is not trained
            gradient = back.gradients.get(name)
            if gradient is None:
                view.zero_()
                continue
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            if back.weight == 1.0:
                view.copy_(gradient)
            elif are_alike(gradient, view):  # in one pass over memory, to the same bits
                torch.mul(gradient, back.weight, out=view)
            else:
                view.copy_(gradient).mul_(back.weight)

    @torch.no_grad()
    def _add(self, stage: Stage, put: PlacedShard) -> None:
        """Make the additions that a shard completes, of the stage's parameters alone."""
        for left, right in put.additions:
            pairs = zip(self._owned(stage, left), self._owned(stage, right), strict=True)
            for sums, addends in pairs:
                sums.add_(addends)

    def _owned(self, stage: Stage, place: int) -> list[torch.Tensor]:
        """Return the slices of a vector with the stage's parameters."""
        key = (stage.graph.index, place)
        if key not in self._stretches:
            flat = self._gradients[place]
            names = [name for name in stage.route.owned if name in flat.views]
            self._stretches[key] = [stretch for stretch, _ in flat.runs(names)]
        return self._stretches[key]

    def _receive(self, direction: str, senders: Sequence[int]) -> list[Any]:
        """Return the values of some stages for the present work. Blocks, and counts as waiting."""
        stage, shard = self.at
        self._activity.waits(self._number, stage)
        # A stage without senders does not wait, and keeps the turn.
        with self._outside_turn() if senders else nullcontext():
            keys = [(direction, sender, stage, shard) for sender in senders]
            values = [self._links.take(key)[1] for key in keys]
        self._activity.computes(self._number, stage)
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
            key, device = (direction, stage, to, shard), device_of(to, self._devices)
            if device == self._number:
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
            self.waits(device, device)

    def computes(self, device: int, stage: int) -> None:
        """Note that a device begins to compute."""
        self._words[device] = 2 * stage + 1

    def waits(self, device: int, stage: int) -> None:
        """Note that a device begins to wait for the input of a stage."""
        self._words[device] = 2 * stage

    def read(self, device: int) -> tuple[int, bool]:
        """Return the stage of a device, and whether the device computes."""
        word = self._words[device]
        return word // 2, bool(word % 2)
