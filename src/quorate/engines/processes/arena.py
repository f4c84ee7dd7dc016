"""The arena: what the coordinator and its workers have in shared memory.

The coordinator writes parameters and buffers, and only while no worker has to read them. A worker
writes the slot that it was given for a shard, and its own timesheet.

Legend: N workers, V shards, P elements of the parameters, F of what ``Buffers.values`` returns.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection
from typing import Any, NoReturn

import numpy as np
import torch

from quorate.engines.two_copies import TwoCopies
from quorate.engines.worker_status import SharedTimesheet
from quorate.errors import UserError
from quorate.machine.shared_memory import Segment, require
from quorate.replica.buffers import Buffers
from quorate.replica.channels_last import set_format
from quorate.replica.flat import Description, Flat, Layout, Memory
from quorate.replica.model import bind, trainable
from quorate.replica.snapshots import Vectors
from quorate.replica.witness import writes

_PAGE = 4096
MOST_IN_RUNS = 1 << 24  # bytes of a gradient; of a larger one no shard is short
_AHEAD = struct.Struct("<qq")  # step, shard; nothing at all where a worker loads nothing ahead
_AHEAD_BYTES = TwoCopies.room(_AHEAD.size)
Image = np.ndarray[tuple[int], np.dtype[np.uint8]]  # bytes as they lie in a segment


class Arena:
    """Both sides' view of it. Use ``create`` in the coordinator, ``attach`` in a worker.

    Args:
        parameters: in a segment of their own, as all that outlives the workers.
        average: likewise, if the parameters are averaged.
        frozen: likewise, those that are not trained.
        mutable_frozen: see ``Buffers``; these are no frozen ones here.
        written: names of parameters that the forward pass writes; see ``Writes``.
        floats: F.
        integer_buffers: bytes of all other buffers.
        slots: how many there are.
        again: whether half of them are for jobs that interrupt another.
        snapshots: how many of them, the last ones, hold snapshots of the parameters.
        workers: N.
        segment: all the rest; made here if it is not given.
    """

    def __init__(
        self,
        parameters: Flat,
        average: Flat | None,
        frozen: Flat,
        *,
        mutable_frozen: Collection[int],
        written: Collection[str] = (),
        floats: int,
        integer_buffers: int,
        slots: int,
        again: bool,
        snapshots: int,
        workers: int,
        segment: Segment | None = None,
    ) -> None:
        self.parameters, self.average, self.frozen = parameters, average, frozen
        self.published = 0  # how often what workers read may have changed, but for snapshots
        self.slots = slots - snapshots
        self.snapshots = range(slots - snapshots, slots)
        self.mutable_frozen, self.written = frozenset(mutable_frozen), frozenset(written)
        self._writes = writes.layout(parameters.views, written)
        self._slots: dict[int, Vectors] = {}
        self._slots_of_a_job = self.slots // (1 + again)
        self._sizes = {
            "floats": floats,
            "integer_buffers": integer_buffers,
            "slots": slots,
            "again": again,
            "snapshots": snapshots,
            "workers": workers,
        }
        # From the front: buffers; workers' timesheets, which ticket they may leave off, and what
        # they load ahead; then the slots, each on pages of its own: those never used cost nothing.
        integer_buffers_at = 8 * floats
        self._buffers_bytes = integer_buffers_at + integer_buffers
        sheets_at = _up(self._buffers_bytes, 64)
        cancelled_at = _up(sheets_at + workers * SharedTimesheet.SIZE, 64)
        ahead_at = _up(cancelled_at + 8 * workers, 64)
        self._slots_at = _up(ahead_at + workers * _AHEAD_BYTES, _PAGE)
        self._written_at = _up(  # within a slot
            _up(_room(parameters, snapshots).nbytes, 64) + 8 * floats + integer_buffers, 64
        )
        self.slot_bytes = _up(self._written_at + self._writes.nbytes, _PAGE)
        nbytes = self._slots_at + slots * self.slot_bytes
        self._segment = segment or Segment(nbytes)
        self._in_stages = False
        self.current = Vectors(
            parameters,
            self._segment.tensor(torch.float64, floats, 0),
            self._segment.tensor(torch.uint8, integer_buffers, integer_buffers_at),
        )
        self.sheets = [
            SharedTimesheet(self._segment.map, sheets_at + worker * SharedTimesheet.SIZE)
            for worker in range(workers)
        ]
        self._ahead = [
            TwoCopies(self._segment.map, ahead_at + worker * _AHEAD_BYTES, _AHEAD.size)
            for worker in range(workers)
        ]
        # Per worker the ticket of a cancelled request. An aligned integer is written at once.
        tickets = self._segment.array(8 * workers, cancelled_at)
        self.cancelled = tickets.view(np.int64)  # (N,)
        if segment is None:
            self.cancelled[:] = -1
            for sheet in self.sheets:
                sheet.tell("starting")

    # --- the coordinator's side -------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        model: torch.nn.Module,
        parameters: Flat,
        average: Flat | None,
        *,
        mutable_frozen: Collection[int],
        written: Collection[str] = (),
        results: int,
        again: bool = False,
        on_snapshots: bool,
        workers: int,
        in_stages: bool = False,
    ) -> Arena:
        """Share a model whose trainable parameters lie in a segment; the frozen ones move to one.

        Args:
            results: how many shards' results may wait for others of their step, or to be applied.
            again: whether a step is computed again while the results of its first time wait.
            on_snapshots: whether workers compute from snapshots.
            in_stages: whether shards are dealt in runs in any case, as they flow through stages.

        Raises:
            UserError: there is not enough memory for it.
        """
        buffers = Buffers(model, mutable_frozen)
        floats, integer_buffers = (
            _or_empty(buffers.values()),
            _or_empty(buffers.integer_buffers()),
        )
        layout = Layout(_frozen(model, mutable_frozen, parameters.layout).items())
        # Runs of shards are added up as they come: a worker's take about as many slots as the tree
        # has levels, and one that it is writing.
        levels = (results - 1).bit_length()
        snapshots = workers + 1 if on_snapshots else 0
        used = min(results + workers, workers * (levels + 2)) * (1 + again) + snapshots
        slot_bytes = _room(parameters, snapshots).nbytes + 8 * floats.numel()
        slot_bytes += integer_buffers.numel() + writes.layout(parameters.views, written).nbytes
        require(  # and one for parameters at the start
            layout.nbytes + used * slot_bytes + max(slot_bytes, parameters.layout.nbytes),
            f"gradients of {results} shards on {workers} workers",
            "use fewer workers, or engine='towers'",
        )
        frozen = layout.shared()
        may_run = in_stages or _may_run(parameters)
        arena = cls(
            parameters,
            average,
            frozen,
            mutable_frozen=mutable_frozen,
            written=written,
            floats=floats.numel(),
            integer_buffers=integer_buffers.numel(),
            # Per worker one that is being computed, and one that is done and not decided on; and
            # where there are runs, what late workers have of a step before.
            slots=(results * (1 + may_run) + 2 * workers) * (1 + again) + snapshots,
            again=again,
            snapshots=snapshots,
            workers=workers,
        )
        for name, parameter in _frozen(model, mutable_frozen, parameters.layout).items():
            arena.frozen.views[name].copy_(parameter.detach())
        arena._bind_frozen(model)
        arena._in_stages = in_stages
        return arena

    @property
    def takes_runs(self) -> bool:
        """Whether there are slots for shards that are dealt in runs."""
        return self._in_stages or _may_run(self.parameters)

    def lent(self, *, again: bool) -> range:
        """Return the slots of a job: of one that interrupts another they are others.

        The interrupted one's hold results, and a worker may still be writing to one of them.
        """
        first = self._slots_of_a_job if again else 0
        return range(first, first + self._slots_of_a_job)

    def handed_over(self) -> tuple[dict[str, Any], list[int]]:
        """Return what ``attach`` needs: a description in JSON, and descriptors."""
        segments = [self.parameters.segment, self.frozen.segment, self._segment]
        if self.average is not None:
            segments.append(self.average.segment)
        fds = [segment.fd for segment in segments if segment is not None]
        assert len(fds) == len(segments)
        return {
            "parameters": self.parameters.layout.described(),
            "by_rows": sorted(self.parameters.layout.by_rows),
            "frozen": self.frozen.layout.described(),
            "average": self.average is not None,
            "mutable_frozen": sorted(self.mutable_frozen),
            "written": sorted(self.written),
            **self._sizes,
        }, fds

    def kept(self, buffers: Buffers) -> Segment:
        """Return a copy of the parameters, and of the coordinator's buffers, as they are now."""
        beside = _up(self.parameters.layout.nbytes, 64) + self._buffers_bytes
        segment = Segment(max(self.slot_bytes, beside))
        values = self.slot_in(segment, of_parameters=True)
        values.flat.copy_(self.parameters)
        values.take_buffers(buffers)
        return segment

    def publish(self, buffers: Buffers) -> None:
        """Show workers the coordinator's buffers, and its parameters as they are now."""
        self.published += 1
        self.current.take_buffers(buffers)

    def loaded_ahead(self, worker: int) -> tuple[int, int] | None:
        """Return the step and shard whose rows a worker loads ahead, or did at its end."""
        _, content = self._ahead[worker].read()
        if not content:
            return None
        step, shard = _AHEAD.unpack(content)
        return step, shard

    # --- a worker's side --------------------------------------------------------------------------

    @classmethod
    def attach(cls, description: dict[str, Any], fds: list[int], model: torch.nn.Module) -> Arena:
        """Map the coordinator's memory, and give a worker's model the frozen parameters there.

        Args:
            description: from ``handed_over``.
            fds: the descriptors from there come first, and are taken out of the list.

        Raises:
            UserError: the script made another model in this process.
        """
        parameters, by_rows, frozen, average, sizes = _unpacked(description)
        layout = Layout.of(parameters, by_rows)
        _compare(parameters, Layout(trainable(model).items(), by_rows).described())
        own = _frozen(model, sizes["mutable_frozen"], layout)
        _compare(frozen, Layout(own.items()).described())
        own_fds = [fds.pop(0) for _ in range(3 + average)]
        first, second, rest, *more = (Segment(os.fstat(fd).st_size, fd) for fd in own_fds)
        if any(_is_channels_last(shape, stride) for _, _, shape, stride in parameters):
            set_format(model, torch.channels_last)  # buffers too, which have a format of their own
        shadow = layout.over(more[0]) if more else None
        frozen_there = Layout.of(frozen).over(second)
        arena = cls(layout.over(first), shadow, frozen_there, **sizes, segment=rest)
        arena._bind_frozen(model)
        return arena

    # --- a node's side, where workers do not see the coordinator's memory -------------------------

    @classmethod
    def like(cls, description: dict[str, Any]) -> Arena:
        """Return an arena of the same layout in memory of its own.

        Args:
            description: from ``handed_over``, perhaps with other numbers of slots.
        """
        parameters, by_rows, frozen, average, sizes = _unpacked(description)
        layout = Layout.of(parameters, by_rows)
        shadow = layout.shared() if average else None
        return cls(layout.shared(), shadow, Layout.of(frozen).shared(), **sizes)

    def slot_image(self, number: int) -> Image:
        """Return the bytes of a slot, as they lie here."""
        return self._segment.array(self.slot_bytes, self._slots_at + number * self.slot_bytes)

    def rest_image(self, number: int) -> Image:
        """Return the bytes of a slot behind its parameters or gradient, as they lie here."""
        return self.slot_image(number)[_up(self.parameters.layout.nbytes, 64) :]

    def buffers_image(self) -> Image:
        """Return the bytes of the buffers, as they lie here."""
        return self._segment.array(self._buffers_bytes)

    def read(self, buffers: Buffers) -> None:
        """Take the coordinator's buffers."""
        self.current.set(buffers)

    def loads_ahead(self, worker: int, ticket: tuple[int, int] | None) -> None:
        """Say what this worker loads ahead from now on, beside the shard that it is at."""
        ahead = self._ahead[worker]
        ahead.write(ahead.read()[0] + 1, b"" if ticket is None else _AHEAD.pack(*ticket))

    # --- both -------------------------------------------------------------------------------------

    def slot(self, number: int) -> Vectors:
        """Return the slot of a number; its views are made once, as there is one per parameter."""
        if number not in self._slots:
            self._slots[number] = self._slot(number)
        return self._slots[number]

    def _slot(self, number: int) -> Vectors:
        start, of_parameters = self._slots_at + number * self.slot_bytes, number in self.snapshots
        return self.slot_in(self._segment, start, of_parameters=of_parameters)

    def slot_in(self, memory: Memory, start: int = 0, *, of_parameters: bool = False) -> Vectors:
        """Return a slot that lies in memory, from byte ``start`` on: of parameters or gradients."""
        layout = self.parameters.layout if of_parameters else self.parameters.layout.gradients
        floats_at = start + _up(layout.nbytes, 64)
        floats, integer_buffers = self.current.floats.numel(), self.current.integer_buffers.numel()
        return Vectors(
            layout.over(memory, start),
            memory.tensor(torch.float64, floats, floats_at),
            memory.tensor(torch.uint8, integer_buffers, floats_at + 8 * floats),
            self._writes.over(memory, start + self._written_at)
            if self.written and not of_parameters
            else None,
        )

    def _bind_frozen(self, model: torch.nn.Module) -> None:
        bind(_frozen(model, self.mutable_frozen, self.parameters.layout), self.frozen)


def _unpacked(
    description: dict[str, Any],
) -> tuple[Description, list[str], Description, bool, dict[str, Any]]:
    """Return the layout of parameters, names with rows, frozen layout, averaged?, and the rest."""
    rest = dict(description)
    parameters, by_rows, frozen, average = map(
        rest.pop, ("parameters", "by_rows", "frozen", "average")
    )
    return parameters, by_rows, frozen, average, rest


def _is_channels_last(shape: list[int], stride: list[int]) -> bool:
    # Not is_contiguous(): a tensor of one channel is contiguous in both formats.
    return len(shape) == 4 and tuple(stride) != torch.empty(shape, device="meta").stride()


def _compare(coordinators: Description, own: Description) -> None:
    """Refuse another model. Strides do not count: the coordinator chose the memory format."""

    def refuse(got: str, expected: str) -> NoReturn:
        raise UserError(
            f"a worker that ran the script again made another model: got {got}, expected "
            f"{expected} as in the coordinator; make the script repeatable, or use engine='towers'"
        )

    for expected, got in zip(coordinators, own, strict=False):
        if expected[:3] != got[:3]:
            refuse(f"parameter {got[:3]}", f"{expected[:3]}")
    if len(coordinators) != len(own):
        refuse(f"{len(own)} parameters", f"{len(coordinators)}")


def _may_run(parameters: Flat) -> bool:
    return parameters.layout.gradients.nbytes <= MOST_IN_RUNS


def _room(parameters: Flat, snapshots: int) -> Layout:
    """Return what every slot has room for: a gradient, or all parameters."""
    return parameters.layout if snapshots else parameters.layout.gradients


def _frozen(
    model: torch.nn.Module, mutable_frozen: Collection[int], trained: Layout
) -> dict[str, torch.nn.Parameter]:
    return {
        name: parameter
        for number, (name, parameter) in enumerate(model.named_parameters())
        if name not in trained.sections and number not in mutable_frozen
    }


def _or_empty(values: torch.Tensor | None) -> torch.Tensor:
    return torch.empty(0) if values is None else values


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
