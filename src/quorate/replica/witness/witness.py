"""The witness of a replica: finds writes by shards to parameters reserved for updates."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from quorate.replica.flat import Flat
from quorate.replica.loss import Loss
from quorate.replica.model import bind, frozen, laid_out
from quorate.replica.notes import Notes
from quorate.replica.spread import SplitFlat
from quorate.replica.witness.data_writes import names_data
from quorate.replica.witness.given import LoadedRows, RowLoader
from quorate.replica.witness.guard import ParameterGuard
from quorate.replica.witness.writes import ParameterWrites


class Witness:
    """The checks of a replica before and after each shard, without a cost in between.

    Args:
        model: the replica's model.
        original: the coordinator's model; parameters may be shared with the replica's.
        parameters: the coordinator's trained parameters.
        loss: the user's loss function.
        notes: messages for the user.
        written: names of parameters known to be written by the forward pass.
        mutable_frozen: see ``Buffers``: numbers of parameters treated as buffers.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        original: torch.nn.Module,
        parameters: Flat,
        loss: Loss,
        notes: Notes,
        written: Collection[str],
        mutable_frozen: Collection[int],
    ) -> None:
        self.is_silent = False  # during trials that find the writes to expect
        self.given: LoadedRows | None = None  # of the current training
        self._has_second = False  # whether these are the second rows
        self._trained = laid_out(model, parameters.views)
        self._writes = ParameterWrites(written, parameters)
        numbered = enumerate(name for name, _ in model.named_parameters())
        unwatched = {name for number, name in numbered if number in mutable_frozen}
        if model is not original:  # the coordinator and callbacks write it while shards run
            shared = {id(p) for p in original.parameters()}
            unwatched |= {name for name, p in model.named_parameters() if id(p) in shared}
        by_value = {id(p) for p in frozen(model).values()} if names_data(model, loss) else set()
        self._guard = ParameterGuard(model, {*unwatched, *written}, notes, by_value=by_value)

    def take_given(self, source: RowLoader, ticket: tuple[int, int], data: Any) -> None:
        """Note rows loaded by a source for training: the second ones, as soon as there are any.

        The first rows may have been loaded before, to measure the time.
        """
        is_first = self.given is None or self.given.source() is not source
        if is_first or not self._has_second:
            self.given, self._has_second = LoadedRows.of(source, ticket, data), not is_first

    def begin(self, values: Flat | SplitFlat) -> None:
        """Note the state before a shard.

        Args:
            values: the vectors that the trained parameters are views of.
        """
        if self._writes.names:
            self._writes.begin(self._trained, values)
        self._guard.begin(values)

    def end(self, values: Flat | SplitFlat) -> Flat | None:
        """Check the state after a shard; return the permitted writes to parameters."""
        self._guard.require_same_objects()
        if not self.is_silent and not self._guard.is_kept():
            bind(self._trained, values)  # parameters moved elsewhere would never be trained again
            self._guard.begin(values)
        return self._writes.taken(self._trained, values) if self._writes.names else None
