"""The witness of one replica: what each of its shards wrote that is not a shard's to write."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from quorate.replica.flat import Flat
from quorate.replica.loss import Loss
from quorate.replica.model import bind, frozen, laid_out
from quorate.replica.notes import Notes
from quorate.replica.spread import Scattered
from quorate.replica.witness.data_writes import names_data
from quorate.replica.witness.given import Given, Loads
from quorate.replica.witness.guard import Guard
from quorate.replica.witness.writes import Writes


class Witness:
    """Looks at a replica before and after each shard; nothing in between is slower for it.

    Args:
        model: the replica's.
        original: the coordinator's, with which it may have parameters in common.
        parameters: the coordinator's trained ones.
        loss: the user's loss function.
        notes: for the user.
        written: names of those that the forward pass is known to write.
        mutable_frozen: see ``Buffers``: numbers of parameters that are buffers by another name.
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
        self.is_silent = False  # as long as it is looked what has to be expected
        self.given: Given | None = None  # of the training under way
        self._has_second = False  # whether that is what was given second
        self._trained = laid_out(model, parameters.views)
        self._writes = Writes(written, parameters)
        numbered = enumerate(name for name, _ in model.named_parameters())
        unwatched = {name for number, name in numbered if number in mutable_frozen}
        if model is not original:  # which the coordinator and callbacks write while shards run
            shared = {id(p) for p in original.parameters()}
            unwatched |= {name for name, p in model.named_parameters() if id(p) in shared}
        by_value = {id(p) for p in frozen(model).values()} if names_data(model, loss) else set()
        self._guard = Guard(model, {*unwatched, *written}, notes, by_value=by_value)

    def take_given(self, source: Loads, ticket: tuple[int, int], data: Any) -> None:
        """Note rows that a source has loaded for training: the second ones, once there are some.

        The first ones may have been loaded before, to see how long that takes.
        """
        is_first = self.given is None or self.given.source() is not source
        if is_first or not self._has_second:
            self.given, self._has_second = Given.of(source, ticket, data), not is_first

    def begin(self, values: Flat | Scattered) -> None:
        """Look before a shard.

        Args:
            values: what the trained parameters are views of.
        """
        if self._writes.names:
            self._writes.begin(self._trained, values)
        self._guard.begin(values)

    def end(self, values: Flat | Scattered) -> Flat | None:
        """Look after a shard; return what it wrote of the parameters that it may write."""
        self._guard.require_same_objects()
        if not self.is_silent and not self._guard.is_kept():
            bind(self._trained, values)  # what was put elsewhere would never be trained again
            self._guard.begin(values)
        return self._writes.taken(self._trained, values) if self._writes.names else None
