"""Stray writes: parameters written by shards, though only updates and user code may write them.

A replica reads the coordinator's parameters in place, and towers share the frozen parameters with
the coordinator. Around a shard, a write could not be told from a concurrent update or callback: a
tower may still compute a copy of a shard whose result came from another tower. Between two updates
nothing is written. In-place writes by ``.data`` are not counted by torch: values are compared.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from quorate.replica.loss import Loss
from quorate.replica.notes import Notes
from quorate.replica.witness.data_writes import names_data
from quorate.replica.witness.guard import bit_sum, places, tell_late


class StrayWrites:
    """Finds writes by shards to frozen parameters; to all parameters, if code names ``.data``.

    Args:
        model: the coordinator's model.
        loss: the user's loss function.
        trained: names of the trained parameters.
        written: names of trained parameters known to be written by forward.
        mutable_frozen: numbers of frozen parameters known to be written by forward.
        notes: messages for the user.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Loss,
        notes: Notes,
        *,
        trained: Collection[str],
        written: Collection[str],
        mutable_frozen: Collection[int],
    ) -> None:
        self._model = model
        self._notes = notes
        parameters = {
            name: parameter
            for number, (name, parameter) in enumerate(model.named_parameters())
            if name not in written and number not in mutable_frozen
        }
        self._names = [*parameters]
        self._watched = dict(parameters) if names_data(model, loss) else {}
        self._frozen = {n: p for n, p in parameters.items() if n not in trained}
        self._sums: dict[str, torch.Tensor] = {}
        self._places: dict[str, tuple[int, int]] = {}

    def begin(self) -> None:
        """Note the present values: user code has run, and the next shards will be computed."""
        self._places = self._places_now()
        self._sums = {name: bit_sum(parameter) for name, parameter in self._watched.items()}

    def end(self) -> None:
        """Report parameters written by shards, before an update. Further calls have no effect."""
        if not (self._sums or self._places):
            return
        written = {n for n, old in self._sums.items() if not old.equal(bit_sum(self._watched[n]))}
        written |= {n for n, place in self._places_now().items() if place != self._places[n]}
        self._sums, self._places = {}, {}
        if not written:
            return
        tell_late(self._notes, self._model, [n for n in self._names if n in written])
        for name in written:  # each is reported once
            self._watched.pop(name, None)
            self._frozen.pop(name, None)

    def _places_now(self) -> dict[str, tuple[int, int]]:
        if not self._frozen:
            return {}
        return dict(zip(self._frozen, places([*self._frozen.values()]), strict=True))
