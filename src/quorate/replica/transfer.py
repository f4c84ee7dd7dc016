"""Transfers of batches to a GPU: from page-locked memory, on a stream of their own.

A copy from page-locked memory runs beside the kernels of the shard before it; from other memory the
driver copies it on the host first, and the thread waits. Elsewhere a batch is moved as ever.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from quorate.replica.nested import mapped, tensors


def move(batch: Any, device: torch.device) -> Any:
    """Return the batch with every tensor in it on the device; those that are there stay."""
    return mapped(batch, lambda tensor: tensor.to(device, non_blocking=True))


def pinned(batch: Any, device: torch.device) -> Any:
    """Return the batch in page-locked memory, if that helps a transfer to the device."""
    if device.type != "cuda":
        return batch
    with torch.cuda.device(device):  # or another GPU may be given a context for it
        return mapped(batch, lambda t: t.pin_memory() if t.device.type == "cpu" else t)


class Transfers:
    """Transfers to one device, for one thread at a time that computes on its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: Any = None  # the stream
        # Batches, what they become, and events: one that is taken at once, and the one after it.
        self._begun: deque[tuple[Any, Any, Any]] = deque(maxlen=2)

    def begin(self, batch: Any) -> None:
        """Begin to move a batch that may be taken soon. Does not wait."""
        if self._device.type != "cuda" or any(t.device.type != "cpu" for t in tensors(batch)):
            return
        if any(known is batch for known, _, _ in self._begun):
            return
        with torch.cuda.device(self._device):
            if self._side is None:
                self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._side):
                moved = move(batch, self._device)
                self._begun.append((batch, moved, self._side.record_event()))

    def take(self, batch: Any) -> Any:
        """Return the batch on the device, for the current stream."""
        self.begin(batch)
        begun = next((each for each in self._begun if each[0] is batch), None)
        if begun is None:
            return move(batch, self._device)
        self._begun = deque((each for each in self._begun if each is not begun), maxlen=2)
        _, moved, event = begun
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event)
        for tensor in tensors(moved):
            tensor.record_stream(current)  # its memory is the side stream's
        return moved
