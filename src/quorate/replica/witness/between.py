"""What only updates and user code may write: whether shards left it as it was.

A replica reads the coordinator's parameters where they are. A write by ``.data`` in place is
counted nowhere, and all others compute from what was written. Around a shard it could not be told
from an update that is made meanwhile; between two updates nobody writes.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from quorate.replica.loss import Loss
from quorate.replica.notes import Notes
from quorate.replica.witness.data_writes import names_data
from quorate.replica.witness.guard import bit_sum, tell_late


class Between:
    """Looks at a model's parameters between updates, if its code names ``.data``.

    Args:
        model: the coordinator's.
        loss: the user's loss function.
        written: names of trained parameters that forward is known to write.
        mutable_frozen: numbers of frozen ones, likewise.
        notes: for the user.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Loss,
        notes: Notes,
        *,
        written: Collection[str],
        mutable_frozen: Collection[int],
    ) -> None:
        self._model = model
        self._notes = notes
        numbered = enumerate(model.named_parameters()) if names_data(model, loss) else ()
        self._watched = {
            name: parameter
            for number, (name, parameter) in numbered
            if name not in written and number not in mutable_frozen
        }
        self._sums: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        """Note how all is: user code has had its turn, and the next shards are computed."""
        self._sums = {name: bit_sum(parameter) for name, parameter in self._watched.items()}

    def end(self) -> None:
        """Look what shards have written, before an update."""
        names = [n for n, old in self._sums.items() if not old.equal(bit_sum(self._watched[n]))]
        for name in names:
            del self._watched[name]  # said once
        tell_late(self._notes, self._model, names)
