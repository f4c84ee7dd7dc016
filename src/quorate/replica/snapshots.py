"""Snapshots: parameters and buffers for workers to read while updates go on.

Each snapshot is the complete result of an update. The coordinator copies its own values into a
snapshot without readers; so no reader has to lock, retry, or wait, and a reader killed or stopped
in the middle blocks nobody.

Legend: N workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from quorate.replica.buffers import Buffers
from quorate.replica.flat import Flat


class VectorSet(NamedTuple):
    """A value for every parameter (itself, or its gradient), and for every buffer."""

    flat: Flat
    floats: torch.Tensor  # as of ``Buffers.values``, float64
    integer_buffers: torch.Tensor  # (bytes of the other buffers,) uint8
    written: Flat | None = None  # parameters written by forward, see ``writes``

    def set(self, buffers: Buffers) -> None:
        """Set buffers to these values."""
        buffers.set(
            self.floats if self.floats.numel() else None,
            self.integer_buffers if self.integer_buffers.numel() else None,
        )

    def take_buffers(self, buffers: Buffers) -> None:
        """Copy the values of buffers."""
        if (floats := buffers.values()) is not None:
            self.floats.copy_(floats)
        if (integer_buffers := buffers.integer_buffers()) is not None:
            self.integer_buffers.copy_(integer_buffers)


class Snapshot(NamedTuple):
    """The parameters and buffers after one update."""

    values: VectorSet
    number: int  # of its slot
    version: int  # counts snapshots; unique


class Snapshots:
    """A lender of snapshots: each worker gets the newest until the end of a shard.

    Args:
        parameters: the coordinator's parameters; None: servers have the parameters, and nodes
            fetch the parameters of a snapshot from the servers.
        buffers: the coordinator's buffers.
        slots: memory of N + 1 snapshots, by number: workers may read N different snapshots while
            the coordinator writes another.
    """

    def __init__(
        self, parameters: Flat | None, buffers: Buffers, slots: Mapping[int, VectorSet]
    ) -> None:
        self._parameters = parameters
        self._buffers = buffers
        self._slots = slots
        self._lent: dict[int, int] = {}  # worker -> number
        self._taken = 0
        self._newest: Snapshot | None = None

    def renew(self) -> None:
        """Note new parameters and buffers, to be copied at the next loan.

        They are copied only then, because user code may change them before.
        """
        self._newest = None

    def _take(self) -> Snapshot:
        """Make a snapshot of the present parameters and buffers."""
        number = next(n for n in self._slots if n not in self._lent.values())
        values = self._slots[number]
        if self._parameters is not None:
            values.flat.copy_(self._parameters)
        values.take_buffers(self._buffers)
        self._taken += 1
        return Snapshot(values, number, self._taken)

    def lend(self, worker: int) -> Snapshot:
        """Return the newest snapshot, unchanged until the worker gives the snapshot back."""
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
        number: VectorSet(
            parameters.layout.new(parameters.device),
            none if floats is None else torch.empty_like(floats),
            none if integer_buffers is None else torch.empty_like(integer_buffers),
        )
        for number in range(workers + 1)
    }
    return Snapshots(parameters, buffers, slots)
