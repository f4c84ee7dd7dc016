"""Transfers of batches to an accelerator: from page-locked memory, on a stream of their own.

A copy from page-locked memory runs beside the kernels of the previous shard; from other memory the
driver first copies the batch on the host, and the thread waits. On other devices a batch is moved
without a stream.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Hashable
from numbers import Number
from operator import attrgetter
from typing import Any

import torch

from quorate.machine.devices import current, has_streams
from quorate.replica.nested import leaves, mapped, mapped_leaves, tensors
from quorate.replica.torch_internals import version, versions

_TENSORS = {torch.Tensor}
_DEVICE, _IS_INFERENCE = attrgetter("device"), torch.Tensor.is_inference


def move(batch: Any, device: torch.device) -> Any:
    """Return the batch with every tensor on the device; tensors already there are kept."""
    is_late = device.type != "cpu"  # the host would read memory before the copy has arrived

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device == device else tensor.to(device, non_blocking=is_late)

    if type(batch) is list and _is_of_tensors(batch):  # the usual batch, without a walk
        return batch.copy() if {*map(_DEVICE, batch)} == {device} else [*map(moved, batch)]
    return mapped(batch, moved)


def pinned(batch: Any, device: torch.device) -> Any:
    """Return the batch in page-locked memory, if this speeds up a transfer to the device."""
    if not has_streams(device):
        return batch
    with current(device):  # otherwise another GPU may get a context
        return mapped(batch, lambda t: t.pin_memory() if t.device.type == "cpu" else t)


class Transfers:
    """Transfers to a device, for a computing thread and its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_streams = has_streams(device)
        self._side: torch.Stream | None = None
        # By step and shard: loaded rows that are needed again in the same step.
        self.kept: dict[tuple[int, int], Any] = {}
        # Batches, their moved copies, and events: of the batch to take now, and the next one.
        self._begun: deque[tuple[Any, Any, Any]] = deque(maxlen=2)

    def keep(self, ticket: tuple[int, int], batch: Any) -> None:
        """Keep the rows of a shard for another computation in the same step."""
        for old in [known for known in self.kept if known[0] != ticket[0]]:
            del self.kept[old]
        self.kept[ticket] = batch

    def begin(self, batch: Any) -> None:
        """Begin to move a batch that may be taken soon. Does not wait."""
        if not self._has_streams or any(t.device.type != "cpu" for t in tensors(batch)):
            return
        if any(known is batch for known, _, _ in self._begun):
            return
        if self._side is None:
            self._side = torch.Stream(self._device)
        with self._side:
            moved = move(batch, self._device)
            self._begun.append((batch, moved, self._side.record_event()))

    def take(self, batch: Any) -> Any:
        """Return the batch on the device, for the current stream."""
        if not self._has_streams:
            return move(batch, self._device)
        self.begin(batch)
        begun = next((each for each in self._begun if each[0] is batch), None)
        if begun is None:
            return move(batch, self._device)
        self._begun = deque((each for each in self._begun if each is not begun), maxlen=2)
        _, moved, event = begun
        stream = torch.accelerator.current_stream(self._device)
        stream.wait_event(event)
        for tensor in tensors(moved):
            tensor.record_stream(stream)  # its memory belongs to the side stream
        return moved


class WrittenError(BaseException):
    """A written batch is needed again, and has to be loaded anew.

    Not an ``Exception``: code for repeated computations must not handle this as a user's error.
    """


class FreshBatch:
    """A batch for repeated computations, with the original content in each.

    User code may take entries out of a batch, or write its tensors in place, for example to mask
    labels. Containers are new each time. Tensors are copied only if ``keeps`` is set; otherwise
    nothing is copied, and writes are detected when the batch is taken again.

    Args:
        batch: the batch as loaded.
        move: returns a batch in new containers, with its tensors on the device.
        keeps: whether ``take`` returns copies.
    """

    def __init__(self, batch: Any, move: Callable[[Any], Any], *, keeps: bool) -> None:
        self.on_device = move(batch)  # for its shapes; not to be passed to user code
        self._batch = batch
        self._move = move
        self._keeps = keeps
        self._before: list[Hashable] | None = None

    @property
    def is_written(self) -> bool:
        """True if the batch may have been written since the first computation."""
        return not self._keeps and _states(self._batch) != self._before

    def take(self) -> Any:
        """Return the batch for a computation.

        Raises:
            WrittenError: the batch was taken before, and may have been written since.
        """
        if self._keeps:
            return mapped_leaves(self.on_device, copied)
        now = _states(self._batch)
        if self._before is None:
            self._before = now
            return self.on_device
        if now != self._before:
            raise WrittenError
        return self._move(self._batch)


def copied(leaf: Any) -> Any:
    """Return a copy of a leaf, with the same strides if a tensor."""
    if _is_fixed(leaf):
        return leaf
    if not isinstance(leaf, torch.Tensor):
        try:
            return copy.deepcopy(leaf)
        except Exception:  # an object of the user that cannot be copied is shared
            return leaf
    return with_strides(leaf, torch.Tensor.clone)


def with_strides(
    tensor: torch.Tensor, copy_of: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return a copy of a tensor with the same strides, also with gaps or repeated elements.

    Args:
        copy_of: copies a tensor, to any device; keeps only strides without gaps.
    """
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.numel() == 0:
        return copy_of(tensor)
    # Kernels, and so bits, may depend on strides.
    extent = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    has_no_gap = extent == tensor.numel()
    if has_no_gap or extent > 2 * tensor.numel() or tensor.is_conj() or tensor.is_neg():
        return copy_of(tensor)
    window = copy_of(tensor.detach().as_strided((extent,), (1,)))
    return window.as_strided(tensor.shape, tensor.stride())


def _states(batch: Any) -> list[Hashable]:
    """Return a list that changes if a leaf of the batch was written, or may have been written."""
    if type(batch) is list and _is_of_tensors(batch) and not any(map(_IS_INFERENCE, batch)):
        return [*versions(batch)]
    return [_state(leaf) for leaf in leaves(batch)]


def _state(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        # torch does not count writes to tensors of inference_mode.
        return object() if leaf.is_inference() else version(leaf)
    return None if _is_fixed(leaf) else object()


def _is_of_tensors(parts: list[Any]) -> bool:
    """Return whether all parts are plain tensors, without a line of Python for each."""
    return {*map(type, parts)} == _TENSORS


def _is_fixed(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, (str, bytes, range, Number))
