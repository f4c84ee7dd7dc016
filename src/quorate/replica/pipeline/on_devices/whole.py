"""The model of a pipelined replica in one piece, on the devices of its stages.

What is computed in one piece (evaluations, the first shard to compare) is computed here, by the
model's own forward pass, as one device's. Each tensor lies on the device of its stage alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from quorate.machine.devices import current
from quorate.replica.loss import Loss, Outcome
from quorate.replica.pipeline.on_devices.following import Following
from quorate.replica.quick.torch_calls import derive
from quorate.replica.replica import Reload, Replica
from quorate.replica.spread import Scattered
from quorate.replica.streams import Stream
from quorate.replica.transfer import FreshBatch
from quorate.replica.turns import Reseed

T = TypeVar("T")


class Whole(Replica):
    """A replica that is spread as its stages lie, whose forward pass need not know of that."""

    @property
    def lies(self) -> Scattered:
        """What its parameters are views of."""
        assert isinstance(self._flat, Scattered)
        return self._flat

    def _run(
        self,
        work: Callable[[Reseed, Loss, FreshBatch], T],
        batch: Any,
        reload: Reload | None,
        stream: Stream,
        *,
        training: bool,
    ) -> T:
        # One thread for the backward pass, and not one for each device: of a value with three uses
        # on two of them the gradients would be added in the order in which threads come.
        with current(self.device), torch.autograd.set_multithreading_enabled(False):
            return super()._run(work, batch, reload, stream, training=training)

    def _read(self, function: Loss, batch: Any, rows: int, *, training: bool) -> Outcome:
        # Of what is not the user's nothing follows: buffers are written where they lie.
        with Following([*dict.fromkeys(self.group)]):
            return super()._read(function, batch, rows, training=training)

    def _derive(self, value: torch.Tensor, scale: float) -> None:  # noqa: ARG002
        # A checkpoint calls forward again. Its operators follow, and draw where they drew before.
        # Stages are never computed in fp16, which alone has scales.
        derive(value, Following([*dict.fromkeys(self.group)]))
