"""What user code changes between updates of what the loss function names.

A coefficient in a dict that a callback turns: worker processes have a dict of their own, and no
checkpoint has any.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quorate.replica.loss import Loss
from quorate.replica.notes import Notes
from quorate.replica.witness.kept import Kept, changed, kept_by


class Outside:
    """Looks at what the loss function names in the coordinator's process.

    Args:
        model: the coordinator's; what it has is carried, and is not looked at.
        loss: the loss function.
        alone: whether no shard is computed in this process, so that any change is user code's.
        notes: what is found goes there.
    """

    def __init__(self, model: torch.nn.Module, loss: Loss, notes: Notes, *, alone: bool) -> None:
        self._model = model
        self._loss = loss
        self._notes = notes
        self._alone = alone
        self._last: Kept | None = None  # when the last block was over

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Compare it before and after the block, in which user code runs."""
        before = self._last or kept_by(self._loss, self._model)
        yield
        after = kept_by(self._loss, self._model)
        if self._alone:
            self._last = after
        for name in changed(before, after):
            self._notes.doubt(
                f"{name} changes between updates, and the loss function reads it: worker processes "
                "do not see the change, and no checkpoint saves the value; use a buffer or an "
                "attribute of the model, or a value of quorate.Shared"
            )
