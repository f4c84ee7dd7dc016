"""Snapshots: parameters and buffers that workers read while updates go on.

Each is whole: what one update left behind. The coordinator copies its own into a snapshot that
nobody reads; so no reader has to lock, try again, or wait, and a reader that is killed or stopped
in the middle holds nobody up.

Legend: N workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from quorate.replica.buffers import Buffers
from quorate.replica.flat import Flat


class Vectors(NamedTuple):
    """A value for every parameter (itself, or its gradient), and for every buffer."""

    flat: Flat
    floats: torch.Tensor  # as of ``Buffers.values``, float64
    integer_buffers: torch.Tensor  # (bytes of the other buffers,) uint8
    written: Flat | None = None  # parameters that forward writes, see ``writes``

    def set(self, buffers: Buffers) -> None:
        """Give buffers the values that are here."""
        buffers.set(
            self.floats if self.floats.numel() else None,
            self.integer_buffers if self.integer_buffers.numel() else None,
        )

    def take_buffers(self, buffers: Buffers) -> None:
        """Take the values of buffers."""
        if (floats := buffers.values()) is not None:
            self.floats.copy_(floats)
        if (integer_buffers := buffers.integer_buffers()) is not None:
            self.integer_buffers.copy_(integer_buffers)


class Snapshot(NamedTuple):
    """The parameters and buffers that one update left behind."""

    values: Vectors
    number: int  # of the slot that it lies in
    version: int  # counts snapshots; no two are alike


class Snapshots:
    """Lends each worker the newest snapshot, until it has computed its shard.

    Args:
        parameters: the coordinator's.
        buffers: the coordinator's.
        slots: for N + 1 of them, by number: each worker may read another, and one is written.
    """

    def __init__(self, parameters: Flat, buffers: Buffers, slots: Mapping[int, Vectors]) -> None:
        self._parameters = parameters
        self._buffers = buffers
        self._slots = slots
        self._lent: dict[int, int] = {}  # worker -> number
        self._taken = 0
        self._newest: Snapshot | None = None

    def renew(self) -> None:
        """Note that there are new parameters and buffers: the next loan is of these.

        They are copied only then, as user code may change them before.
        """
        self._newest = None

    def _take(self) -> Snapshot:
        """Make a new snapshot of the parameters and buffers as they are now."""
        number = next(n for n in self._slots if n not in self._lent.values())
        values = self._slots[number]
        values.flat.copy_(self._parameters)
        values.take_buffers(self._buffers)
        self._taken += 1
        return Snapshot(values, number, self._taken)

    def lend(self, worker: int) -> Snapshot:
        """Return the newest snapshot: it stays as it is until the worker gives it back."""
        if self._newest is None:
            self._newest = self._take()
        self._lent[worker] = self._newest.number
        return self._newest

    def give_back(self, worker: int) -> None:
        """Take back a snapshot: the worker has computed its shard, or is gone."""
        self._lent.pop(worker, None)


def new_snapshots(parameters: Flat, buffers: Buffers, workers: int) -> Snapshots:
    """Return snapshots for N workers, in new memory on the parameters' device."""
    none = torch.empty(0)
    floats, integer_buffers = buffers.values(), buffers.integer_buffers()
    slots = {
        number: Vectors(
            parameters.layout.new(parameters.device),
            none if floats is None else torch.empty_like(floats),
            none if integer_buffers is None else torch.empty_like(integer_buffers),
        )
        for number in range(workers + 1)
    }
    return Snapshots(parameters, buffers, slots)
