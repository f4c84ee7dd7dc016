"""The model of a pipelined replica in a single piece, on the devices of its stages.

Computations without stages (evaluations, the first shard to compare) use the model's own forward
pass, as on a single device. Each tensor lies only on the device of its stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from quorate.machine.devices import current
from quorate.replica.loss import Loss, LossResult
from quorate.replica.pipeline.on_devices.following import FollowDevices
from quorate.replica.quick.torch_calls import derive
from quorate.replica.replica import Reload, Replica
from quorate.replica.spread import SplitFlat
from quorate.replica.streams import Stream
from quorate.replica.transfer import FreshBatch
from quorate.replica.turns import Reseed

T = TypeVar("T")


class StagelessReplica(Replica):
    """A replica spread over the devices of its stages, with a forward pass unaware of devices."""

    @property
    def lies(self) -> SplitFlat:
        """The storage of the parameters."""
        assert isinstance(self._flat, SplitFlat)
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
        # A single thread for the backward pass instead of a thread per device: for a value with
        # three uses on two devices, gradients would be added in the order of thread timing.
        with current(self.device), torch.autograd.set_multithreading_enabled(False):
            return super()._run(work, batch, reload, stream, training=training)

    def _read(self, *args: Any, **options: Any) -> LossResult:
        # Only operators of the user's code follow: buffers are written in place.
        with FollowDevices([*dict.fromkeys(self.group)]):
            return super()._read(*args, **options)

    def _derive(self, value: torch.Tensor, scale: float) -> None:  # noqa: ARG002
        # A checkpoint calls forward again. Its operators follow their values, and draw the same
        # numbers. Stages are never computed in fp16, the only precision with scales.
        derive(value, FollowDevices([*dict.fromkeys(self.group)]))
