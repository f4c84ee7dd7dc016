"""Copies of values between threads with different devices.

On the host values are copied: a stage may write in place to a value that an earlier stage has saved
for the backward pass. Between GPUs values are copied on two extra streams, one at each end, so that
no stage waits in the queue of another stage. An event marks the arrival. Both streams note their
use of the memory: without the note the allocator would hand out the memory again.

Strides stay the same: kernels, and so bits, may go by strides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from quorate.machine.devices import has_streams
from quorate.replica.compute_thread import CPU
from quorate.replica.nested import leaves, mapped_leaves, tensors
from quorate.replica.transfer import copied


class ValueInTransit(NamedTuple):
    """A value on its way to a GPU."""

    value: Any
    arrived: Any  # the event


class DeviceCopier:
    """Copies values for a thread on a device.

    Args:
        device: of the receiving thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sides: dict[torch.device, torch.Stream] = {}  # of the ends

    def over(self, value: Any) -> Any:
        """Return a copy on the way; ``received`` returns the copy in the receiving thread."""
        source = next((t.device for t in tensors(value) if has_streams(t.device)), None)
        if source is None or not has_streams(self._device):
            return mapped_leaves(value, self._copied)
        return self._between_gpus(value, source)

    def _copied(self, leaf: Any) -> Any:
        # A tensor of the host goes to a GPU when it is wanted there, and not before.
        if not isinstance(leaf, torch.Tensor) or leaf.device in (CPU, self._device):
            return copied(leaf)
        return _with_strides(leaf, lambda tensor: tensor.to(self._device))

    def _between_gpus(self, value: Any, source: torch.device) -> ValueInTransit:
        begin, end = self._side(source), self._side(self._device)
        begin.wait_event(torch.accelerator.current_stream(source).record_event())

        def moved(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.device != source:
                return copied(leaf)
            leaf.record_stream(begin)
            return _with_strides(leaf, lambda t: t.to(self._device, non_blocking=True, copy=True))

        with end, begin:
            there = mapped_leaves(value, moved)
            if end is not begin:  # what torch has it wait for, if devices have no way of their own
                end.wait_event(begin.record_event())
            return ValueInTransit(there, end.record_event())

    def _side(self, device: torch.device) -> torch.Stream:
        if device not in self._sides:
            self._sides[device] = torch.Stream(device)
        return self._sides[device]


def received(value: Any) -> Any:
    """Return a copy that has arrived, for the calling thread's current streams."""
    if not isinstance(value, ValueInTransit):
        return value
    for leaf in leaves(value.value):
        if isinstance(leaf, torch.Tensor) and has_streams(leaf.device):
            current = torch.accelerator.current_stream(leaf.device)
            current.wait_event(value.arrived)
            leaf.record_stream(current)
    return value.value


def _with_strides(
    tensor: torch.Tensor, move: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return a moved tensor with the same strides, also with gaps or repeated elements."""
    if tensor.layout is not torch.strided or tensor.numel() == 0 or tensor.is_nested:
        return move(tensor)
    extent = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    if extent > 2 * tensor.numel():
        return move(tensor)
    window = move(tensor.as_strided((extent,), (1,)))
    return window.as_strided(tensor.shape, tensor.stride())
