"""The arena: the shared memory of the coordinator and all workers.

The coordinator writes parameters and buffers, and only while no worker reads the two. A worker
writes the slots of its request, and its own timesheet.

Legend: N workers, V shards, F elements of ``Buffers.values``.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from enum import StrEnum
from typing import NamedTuple, NoReturn

import numpy as np
import torch

from quorate.engines.servers import Image
from quorate.engines.two_copies import TwoCopies
from quorate.engines.worker_status import Timesheet
from quorate.errors import UserError
from quorate.machine.shared_memory import Segment, require
from quorate.replica.buffers import Buffers
from quorate.replica.channels_last import set_format
from quorate.replica.flat import Description, Flat, Layout, Memory
from quorate.replica.model import bind, trainable
from quorate.replica.snapshots import VectorSet
from quorate.replica.witness import writes

_PAGE = 4096
MOST_IN_RUNS = 1 << 24  # bytes of a gradient; shards of larger models take too long for runs
MOST_SHARDS = 1 << 24  # of a step, where one integer has step and shard
_SHEET_BYTES = TwoCopies.room(Timesheet.ENTRY_BYTES)


class ArenaPart(StrEnum):
    """The part of an arena with the bytes of an image."""

    PARAMETERS = "parameters"
    SLICES = "slices"  # of the parameters: an image per server
    AVERAGE = "average"
    FROZEN = "frozen"
    BUFFERS = "buffers"
    SNAPSHOT = "snapshot"  # a slot with parameters and buffers
    RESULT = "result"  # a slot with the result of a shard
    REST = "rest"  # of a slot whose parameters or gradient are on servers
    SHARED = "shared"  # tensors of ``Shared``; in no arena
    START = "start"  # parameters and buffers that workers are compared from; in no arena


class ArenaSizes(NamedTuple):
    """The sizes of an arena, and the parameters with a place of their own."""

    mutable_frozen: Collection[int]  # see ``Buffers``: not in ``Arena.frozen``
    written: Collection[str]  # names of parameters written by the forward pass: see ``writes``
    floats: int  # F
    integer_buffers: int  # bytes of all other buffers
    slots: int
    again: bool  # whether half of the slots are for jobs that interrupt a training
    snapshots: int  # how many slots, the last, hold snapshots of the parameters
    workers: int  # N


class ArenaDescription(NamedTuple):
    """The layout of an arena, for a process that maps the memory."""

    parameters: Description
    by_rows: list[str]  # names of the parameters with gradients by rows
    frozen: Description
    average: bool  # whether there are averaged parameters
    sizes: ArenaSizes


class Arena:
    """The shared memory, from one side. Use ``create`` in the coordinator, ``attach`` in a worker.

    Args:
        parameters: in a segment of their own, because parameters outlive the workers.
        average: the averaged parameters, in a segment of their own; None: no average.
        frozen: the parameters that are not trained, in a segment of their own.
        sizes: of everything else.
        segment: everything else. Default: a new segment.
    """

    def __init__(
        self,
        parameters: Flat,
        average: Flat | None,
        frozen: Flat,
        sizes: ArenaSizes,
        segment: Segment | None = None,
    ) -> None:
        self.parameters, self.average, self.frozen, self.sizes = parameters, average, frozen, sizes
        self.published = 0  # counts possible changes of parameters and buffers, without snapshots
        self.takes_runs = False  # whether there are slots for runs of shards
        floats, integer_buffers, workers = sizes.floats, sizes.integer_buffers, sizes.workers
        self.slots = sizes.slots - sizes.snapshots
        self.snapshots = range(self.slots, sizes.slots)
        self._slots_of_a_job = self.slots // (1 + sizes.again)
        self._writes = writes.layout(parameters.views, sizes.written)
        self._slots: dict[int, VectorSet] = {}
        # From the front: buffers; per worker a timesheet, the tickets of cancelled requests, and
        # the shard whose rows are loaded ahead; slots. Slots begin on pages of their own, and the
        # system provides memory for a page with the first write.
        integer_buffers_at = 8 * floats
        self._buffers_bytes = integer_buffers_at + integer_buffers
        sheets_at = _up(self._buffers_bytes, 64)
        cancelled_at = _up(sheets_at + workers * _SHEET_BYTES, 64)
        self._slots_at = _up(cancelled_at + 24 * workers, _PAGE)
        self._written_at = _up(  # within a slot
            _up(_room(parameters, sizes.snapshots).nbytes, 64) + 8 * floats + integer_buffers, 64
        )
        self.slot_bytes = _up(self._written_at + self._writes.nbytes, _PAGE)
        nbytes = self._slots_at + sizes.slots * self.slot_bytes
        self._segment = segment or Segment(nbytes)
        self.current = VectorSet(
            parameters,
            self._segment.tensor(torch.float64, floats, 0),
            self._segment.tensor(torch.uint8, integer_buffers, integer_buffers_at),
        )
        sheets = TwoCopies.row(self._segment.map, sheets_at, workers, Timesheet.ENTRY_BYTES)
        self.sheets = [*map(Timesheet, sheets)]
        # (3, N): by worker the tickets of a cancelled request and of an abandoned speculative one,
        # and step and shard of the rows loaded ahead as one integer; -1 for none. A processor
        # writes an aligned integer as a whole.
        numbers = self._segment.array(24 * workers, cancelled_at).view(np.int64)
        self.cancelled, self.abandoned, self._ahead = numbers.reshape(3, workers)
        if segment is None:
            numbers[:] = -1
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
        """Share a model whose trainable parameters are in a segment; move frozen parameters to one.

        Args:
            results: how many results of shards may wait for other shards, or for an update.
            again: whether a step is computed again while its first results wait. Without, there
                is room to compute a step again whose first results have no gradient.
            on_snapshots: whether workers compute from snapshots.
            in_stages: whether workers need runs of shards, because shards flow through stages.

        Raises:
            UserError: memory is short.
        """
        buffers = Buffers(model, mutable_frozen)
        floats = _numel(buffers.values())
        integer_buffers = _numel(buffers.integer_buffers())
        own_frozen = _frozen(model, mutable_frozen, parameters.layout)
        layout = Layout(own_frozen.items())
        snapshots = workers + 1 if on_snapshots else 0
        # 1. Memory for the slots in use. Results of runs are added on arrival: the results of a
        #    worker take a slot per level of the tree, and the worker writes one more.
        levels = (results - 1).bit_length()
        used = min(results + workers, workers * (levels + 2)) * (1 + again) + snapshots
        slot_bytes = _room(parameters, snapshots).nbytes + 8 * floats + integer_buffers
        slot_bytes += writes.layout(parameters.views, written).nbytes
        require(  # with a slot for the parameters at the start
            layout.nbytes + used * slot_bytes + max(slot_bytes, parameters.layout.nbytes),
            f"gradients of {results} shards on {workers} workers",
            "use fewer workers, or engine='towers'",
        )
        # 2. Slots: for each worker one for the shard under way, and one for a result without the
        #    coordinator's decision; with runs also the results of late workers for the step before.
        takes_runs = in_stages or parameters.layout.gradients.nbytes <= MOST_IN_RUNS
        again = again or not on_snapshots
        slots = (results * (1 + takes_runs) + 2 * workers) * (1 + again) + snapshots
        sizes = ArenaSizes(
            *(sorted(mutable_frozen), sorted(written), floats, integer_buffers),
            *(slots, again, snapshots, workers),
        )
        arena = cls(parameters, average, layout.shared(), sizes)
        arena.takes_runs = takes_runs
        for name, parameter in own_frozen.items():
            arena.frozen.views[name].copy_(parameter.detach())
        bind(own_frozen, arena.frozen)
        return arena

    def lent(self, *, again: bool) -> range:
        """Return the slots of a job; a job that interrupts a training has slots of its own.

        The slots of the interrupted training hold results, or a worker is still writing results.
        """
        first = self._slots_of_a_job if again else 0
        return range(first, first + self._slots_of_a_job)

    def handed_over(self) -> tuple[ArenaDescription, list[int]]:
        """Return the arguments of ``attach``: a description, and descriptors."""
        segments = [self.parameters.segment, self.frozen.segment, self._segment]
        if self.average is not None:
            segments.append(self.average.segment)
        fds = [segment.fd for segment in segments if segment is not None]
        assert len(fds) == len(segments)
        layout, frozen = self.parameters.layout, self.frozen.layout.described()
        own = layout.described(), sorted(layout.by_rows), frozen, self.average is not None
        return ArenaDescription(*own, self.sizes), fds

    def kept(self, buffers: Buffers) -> Segment:
        """Return a copy of the parameters and of the coordinator's buffers."""
        beside = _up(self.parameters.layout.nbytes, 64) + self._buffers_bytes
        segment = Segment(max(self.slot_bytes, beside))
        values = self.slot_in(segment, of_parameters=True)
        values.flat.copy_(self.parameters)
        values.take_buffers(buffers)
        return segment

    def publish(self, buffers: Buffers) -> None:
        """Show workers the coordinator's current buffers and parameters."""
        self.published += 1
        self.current.take_buffers(buffers)

    def loaded_ahead(self, worker: int) -> tuple[int, int] | None:
        """Return the step and shard of the rows that a worker loads ahead, or loaded at its end."""
        ahead = int(self._ahead[worker])
        return None if ahead < 0 else divmod(ahead, MOST_SHARDS)

    # --- a worker's side --------------------------------------------------------------------------

    @classmethod
    def attach(cls, description: ArenaDescription, fds: list[int], model: torch.nn.Module) -> Arena:
        """Map the coordinator's memory, and give a worker's model the frozen parameters there.

        Args:
            description: from ``handed_over``.
            fds: the descriptors from there come first, and are taken out of the list.

        Raises:
            UserError: the script made another model in this process.
        """
        sizes, by_rows = description.sizes, description.by_rows
        layout = Layout.of(description.parameters, by_rows)
        frozen = Layout.of(description.frozen)
        own = Layout(trainable(model).items(), by_rows)
        _require_same(description.parameters, own.described())
        own_frozen = _frozen(model, sizes.mutable_frozen, layout)
        _require_same(description.frozen, Layout(own_frozen.items()).described())
        own_fds = [fds.pop(0) for _ in range(3 + description.average)]
        first, second, rest, *more = (Segment(os.fstat(fd).st_size, fd) for fd in own_fds)
        if any(_is_channels_last(*entry[2:]) for entry in description.parameters):
            set_format(model, torch.channels_last)  # buffers too, which have a format of their own
        average = layout.over(more[0]) if more else None
        arena = cls(layout.over(first), average, frozen.over(second), sizes, rest)
        bind(own_frozen, arena.frozen)
        return arena

    # --- the side of a node without the coordinator's memory --------------------------------------

    @classmethod
    def like(cls, description: ArenaDescription) -> Arena:
        """Return an arena of the same layout in memory of its own.

        Args:
            description: from ``handed_over``, perhaps with other numbers of slots.
        """
        layout = Layout.of(description.parameters, description.by_rows)
        frozen = Layout.of(description.frozen)
        average = layout.shared() if description.average else None
        return cls(layout.shared(), average, frozen.shared(), description.sizes)

    def image(self, part: ArenaPart, slot: int | None = None) -> Image:
        """Return the bytes of a part of the arena, without a copy.

        Args:
            slot: the number of the slot, if the part is in one.
        """
        if slot is not None:
            whole = self._segment.array(self.slot_bytes, self._slots_at + slot * self.slot_bytes)
            behind_vectors = _up(self.parameters.layout.nbytes, 64)
            return whole[behind_vectors:] if part == ArenaPart.REST else whole
        if part == ArenaPart.BUFFERS:
            return self._segment.array(self._buffers_bytes)
        flats = {ArenaPart.AVERAGE: self.average, ArenaPart.FROZEN: self.frozen}
        flat = flats.get(part, self.parameters)
        assert flat is not None
        assert flat.segment is not None
        return flat.segment.array(flat.segment.nbytes)

    def is_cancelled(self, worker: int, ticket: int) -> bool:
        """Return whether a request to a worker is cancelled or abandoned."""
        return bool(self.cancelled[worker] == ticket or self.abandoned[worker] == ticket)

    def loads_ahead(self, worker: int, ticket: tuple[int, int] | None) -> None:
        """Note the step and shard whose rows a worker loads ahead; None: no rows."""
        self._ahead[worker] = -1 if ticket is None else ticket[0] * MOST_SHARDS + ticket[1]

    # --- both -------------------------------------------------------------------------------------

    def slot(self, number: int) -> VectorSet:
        """Return a slot. The views, one per parameter, are made once."""
        if number not in self._slots:
            start, is_snapshot = self._slots_at + number * self.slot_bytes, number in self.snapshots
            slot = self.slot_in(self._segment, start, of_parameters=is_snapshot)
            self._slots[number] = slot
        return self._slots[number]

    def slot_in(self, memory: Memory, start: int = 0, *, of_parameters: bool = False) -> VectorSet:
        """Return views of memory from byte ``start`` on as a slot of parameters or gradients."""
        layout = self.parameters.layout if of_parameters else self.parameters.layout.gradients
        floats_at = start + _up(layout.nbytes, 64)
        floats, integer_buffers = self.sizes.floats, self.sizes.integer_buffers
        return VectorSet(
            layout.over(memory, start),
            memory.tensor(torch.float64, floats, floats_at),
            memory.tensor(torch.uint8, integer_buffers, floats_at + 8 * floats),
            self._writes.over(memory, start + self._written_at)
            if self.sizes.written and not of_parameters
            else None,
        )


def _is_channels_last(shape: list[int], stride: list[int]) -> bool:
    # Not is_contiguous(): a tensor of one channel is contiguous in both formats.
    return len(shape) == 4 and tuple(stride) != torch.empty(shape, device="meta").stride()


def _require_same(coordinators: Description, own: Description) -> None:
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


def _room(parameters: Flat, snapshots: int) -> Layout:
    """Return the layout that fits into every slot: of gradients, or of all parameters."""
    return parameters.layout if snapshots else parameters.layout.gradients


def _frozen(
    model: torch.nn.Module, mutable_frozen: Collection[int], trained: Layout
) -> dict[str, torch.nn.Parameter]:
    return {
        name: parameter
        for number, (name, parameter) in enumerate(model.named_parameters())
        if name not in trained.sections and number not in mutable_frozen
    }


def _numel(values: torch.Tensor | None) -> int:
    return 0 if values is None else values.numel()


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
