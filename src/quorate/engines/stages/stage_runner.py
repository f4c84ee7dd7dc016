"""A device: has some stages of a replica, and computes a row of the schedule.

A device is a process or a thread (``devices.py``), with the same rows, links and sums.

A process is a fork of the process with the replica, made after the first shard: the fork has the
model, the loss function and all reachable objects. A fork owns nothing that matters, and is killed
with the parent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from mmap import mmap
from typing import Any, NamedTuple

import torch

from quorate.coordination.pipeline_schedules import Row, Work
from quorate.coordination.tree import Put
from quorate.engines import remote_error
from quorate.engines.remote_error import exited
from quorate.engines.stages.links import StageLinks
from quorate.replica.beside.values import Values
from quorate.replica.beside.view import View
from quorate.replica.flat import Flat, are_alike
from quorate.replica.pipeline.stage import Back, Given, Stage

PARENT = -1  # the number of the process that has the replica, among those of devices

_Key = tuple[str, int, int, int]  # "forward" or "backward", from which stage, to which, shard


class Micro(NamedTuple):
    """A shard of a run, as sent to a stage."""

    batch: Any  # on the host
    rows: int
    seed: int


@dataclass
class Shared:
    """Memory shared by the parent and all devices of a replica."""

    gradients: Sequence[Flat]  # sums of shards, by place
    devices: int = 0

    def __post_init__(self) -> None:
        """Make the record of the devices at work."""
        self.at_work = StageActivity(self.devices)


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
        shared: memory for gradients.
        turn: entered while the device computes, and left while the device waits.
    """

    def __init__(
        self,
        number: int,
        devices: int,
        stages: Mapping[int, Stage],
        links: StageLinks,
        shared: Shared,
        turn: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._number, self._devices = number, devices
        self._stages = stages
        self._links = links
        self._shared = shared
        self._turn = turn or nullcontext()
        self._micros: list[Micro] = []
        self._puts: Sequence[Put] = ()
        self._stretches: dict[tuple[int, int], list[torch.Tensor]] = {}  # by stage and place
        # Of which the second part is to come, by stage and shard; with when the first was computed.
        self._begun: dict[tuple[int, int], tuple[Back, dict[str, tuple[float, float]]]] = {}
        self.at: tuple[int, int] = (0, 0)  # the stage and the shard that it is at
        self._began = 0.0  # when that had what it needs, by the monotonic clock

    def run(self, row: Row, puts: Sequence[Put]) -> None:
        """Compute the device's row of a run of shards; the batches arrive meanwhile.

        Args:
            puts: place and additions of the gradient of each shard, in the order of the backward
                passes.
        """
        self._micros, self._puts = [], puts
        for work, stage, shard in row:
            self.at = (stage, shard)
            self._shared.at_work.computes(self._number, stage)
            if work is Work.FORWARD:
                while len(self._micros) <= shard:
                    self._micros.append(self._links.take("micro")[1])
                self._forward(self._stages[stage], shard)
            elif work is Work.BACKWARD_WEIGHT:
                self._began = time.monotonic()
                self._complete(self._stages[stage], shard)
            else:
                self._backward(self._stages[stage], shard, work)
        self._shared.at_work.waits(self._number, self.at[0])
        while len(self._micros) < len(puts):
            self._micros.append(self._links.take("micro")[1])

    def _forward(self, stage: Stage, shard: int) -> None:
        number, micro = stage.graph.index, self._micros[shard]

        def receive() -> list[Any]:
            keys = [("forward", each, number, shard) for each in stage.route.forward_from]
            return self._received(keys)

        with self._turn:
            given = stage.forward(shard, micro.batch, micro.rows, micro.seed, receive)
        for to, passed in given.to.items():
            self._send(("forward", number, to, shard), passed)
        self._tell_forward(number, shard, given)

    def _tell_forward(self, number: int, shard: int, given: Given) -> None:
        said: dict[str, Any] = {"buffers": given.buffers}
        said["spans"] = {Work.FORWARD.value: self._span()}
        if given.outcome is not None:
            outcome = given.outcome
            said |= {"weight": outcome.weight, "metrics": outcome.weighted()}
            said["totals"] = outcome.totals
        self._links.send(PARENT, ("done", "forward", number, shard), said)

    def _backward(self, stage: Stage, shard: int, work: Work) -> None:
        number = stage.graph.index

        def receive() -> list[Any]:
            keys = [("backward", each, number, shard) for each in stage.route.back_from]
            return self._received(keys)

        is_first_part = work is Work.BACKWARD_INPUT
        with self._turn:
            back = stage.backward(shard, receive, is_first_part=is_first_part)
        for to, returned in back.to.items():
            self._send(("backward", number, to, shard), returned)
        if is_first_part:
            back = back._replace(to={})  # which is sent
            self._begun[number, shard] = back, {work.value: self._span()}
        else:
            self._end(stage, shard, back, {}, work)

    def _complete(self, stage: Stage, shard: int) -> None:
        back, spans = self._begun.pop((stage.graph.index, shard))
        with self._turn:
            back = stage.complete(back)
        self._end(stage, shard, back, spans, Work.BACKWARD_WEIGHT)

    def _end(
        self,
        stage: Stage,
        shard: int,
        back: Back,
        spans: Mapping[str, tuple[float, float]],
        work: Work,
    ) -> None:
        """Add a shard's gradient to the sums, and tell the parent."""
        put = self._puts[shard]
        self._write(stage, put.place, back)
        self._add(stage, put)
        said = {"has": sorted(back.gradients), "spans": {**spans, work.value: self._span()}}
        self._links.send(PARENT, ("done", "backward", stage.graph.index, shard), said)

    def _span(self) -> tuple[float, float]:
        """Return begin and end of the last work, by the monotonic clock."""
        return self._began, time.monotonic()

    @torch.no_grad()
    def _write(self, stage: Stage, place: int, back: Back) -> None:
        """Write the stage's part of a shard's weighted gradient, as ``Flat.fill`` does."""
        views = self._shared.gradients[place].views
        for name in stage.route.owned:
            if (view := views.get(name)) is None:
                continue  # it is not trained
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
    def _add(self, stage: Stage, put: Put) -> None:
        """Make the additions that a shard completes, of the stage's parameters alone."""
        for left, right in put.additions:
            own = self._own(stage, left), self._own(stage, right)
            for mine, theirs in zip(*own, strict=True):
                mine.add_(theirs)

    def _own(self, stage: Stage, place: int) -> list[torch.Tensor]:
        """Return a stage's slices of a vector."""
        key = (stage.graph.index, place)
        if key not in self._stretches:
            flat = self._shared.gradients[place]
            names = [name for name in stage.route.owned if name in flat.views]
            self._stretches[key] = [stretch for stretch, _ in flat.runs(names)]
        return self._stretches[key]

    def _received(self, keys: Sequence[_Key]) -> list[Any]:
        """Return the values of some keys. Blocks, and counts as waiting."""
        stage, _ = self.at
        self._shared.at_work.waits(self._number, stage)
        # A stage that hears from nobody does not wait, and keeps its turn.
        with self._aside() if keys else nullcontext():
            values = [self._links.take(key)[1] for key in keys]
        self._shared.at_work.computes(self._number, stage)
        self._began = time.monotonic()
        return values

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Leave the turn to other devices within the block."""
        self._turn.__exit__(None, None, None)
        try:
            yield
        finally:
            self._turn.__enter__()

    def _send(self, key: _Key, value: Any) -> None:
        to = device_of(key[2], self._devices)
        if to == self._number:
            self._links.put(key, value)
        else:
            self._links.send(to, key, value)


def next_run(links: StageLinks, shared: View) -> Any:
    """Return the next run, after taking new values of ``Shared``. Blocks."""
    while True:
        what, given = links.take("shared", "run")
        if what == "run":
            return given
        shared.take(unpacked_values(given))


def tell_failed(links: StageLinks, device: StageRunner, error: BaseException) -> None:
    """Send an exception to the parent, with stage and shard."""
    stage, shard = device.at
    if isinstance(error, SystemExit):  # user code's: signals of the job are ignored here
        error = exited(error, f"stage {stage}, shard {shard} of a run")
    links.send(PARENT, "failed", {"at": device.at, "error": remote_error.to_json(error)})


def failure(told: Mapping[str, Any]) -> tuple[int, BaseException]:
    """Return the stage and the exception of a failed device."""
    return told["at"][0], remote_error.from_json(told["error"])


_WORD_BYTES = 8


class StageActivity:
    """The stage of each device, in memory shared with forks that are made later.

    A device may be killed or stopped anywhere: no word is ever locked, and nobody waits for a word.

    Args:
        devices: number of devices.
    """

    def __init__(self, devices: int) -> None:
        # 2 * stage + 1: it computes; 2 * stage: it waits for that stage's turn. Native words of a
        # memoryview are written and read as a whole; struct goes through them byte by byte.
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


def packed_values(values: Values) -> tuple[dict[str, Any], Mapping[str, torch.Tensor]]:
    """Return values of ``Shared`` as a link carries them: processes have forked copies."""
    return values.to_json(stored=True), values.tensors.views


@torch.no_grad()
def unpacked_values(sent: tuple[dict[str, Any], Mapping[str, torch.Tensor]]) -> Values:
    """Return the values of a message, in memory of this process."""
    described, tensors = sent
    values = Values().from_json(described)
    for name, view in values.tensors.views.items():
        view.copy_(tensors[name])
    return values
