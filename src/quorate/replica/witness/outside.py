"""Changes by user code, between updates, to values named by the loss function.

For example a coefficient in a dict, changed by a callback: worker processes have a dict of their
own, and no checkpoint saves the value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quorate.replica.loss import Loss
from quorate.replica.notes import Notes
from quorate.replica.witness.kept import Kept, changed, kept_by


class OutsideChecks:
    """The checks of values named by the loss function, in the coordinator's process.

    Args:
        model: the coordinator's model; its state is carried, and not checked.
        loss: the loss function.
        alone: whether no shard is computed in this process, so that any change is user code's.
        notes: receives the findings.
    """

    def __init__(self, model: torch.nn.Module, loss: Loss, notes: Notes, *, alone: bool) -> None:
        self._model = model
        self._loss = loss
        self._notes = notes
        self._alone = alone
        self._last: Kept | None = None  # at the end of the last block

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Compare the values before and after the block, in which user code runs."""
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
