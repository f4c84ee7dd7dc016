"""Transfers of batches to an accelerator: from page-locked memory, on a stream of their own.

A copy from page-locked memory runs beside the kernels of the shard before it; from other memory the
driver copies it on the host first, and the thread waits. Elsewhere a batch is moved as ever.
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
    """Return the batch with every tensor in it on the device; those that are there stay."""
    is_late = device.type != "cpu"  # the host would read memory before the copy has written it

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device == device else tensor.to(device, non_blocking=is_late)

    if type(batch) is list and _is_of_tensors(batch):  # the usual one, without a walk
        return batch.copy() if {*map(_DEVICE, batch)} == {device} else [*map(moved, batch)]
    return mapped(batch, moved)


def pinned(batch: Any, device: torch.device) -> Any:
    """Return the batch in page-locked memory, if that helps a transfer to the device."""
    if not has_streams(device):
        return batch
    with current(device):  # or another GPU may be given a context for it
        return mapped(batch, lambda t: t.pin_memory() if t.device.type == "cpu" else t)


class Transfers:
    """Transfers to one device, for one thread at a time that computes on its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_streams = has_streams(device)
        self._side: torch.Stream | None = None
        # By step and shard: rows that will be wanted once more in this step, as they were loaded.
        self.kept: dict[tuple[int, int], Any] = {}
        # Batches, what they become, and events: one that is taken at once, and the one after it.
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
            tensor.record_stream(stream)  # its memory is the side stream's
        return moved


class WrittenError(BaseException):
    """A batch is to be computed from again, and user code has written it: load it anew.

    No ``Exception``: what repeats a computation must not take it for the user's.
    """


class FreshBatch:
    """A batch that may be computed from several times, and is what it was each time.

    User code may take entries out of a batch, or write its tensors in place: mask labels, say.
    Containers are new ones each time. Tensors are copied only if ``keeps`` is set; without it
    nothing is copied, and what was written is found out when it is wanted again.

    Args:
        batch: as it was loaded.
        move: returns it in new containers, with its tensors on the device.
        keeps: whether to hand out copies.
    """

    def __init__(self, batch: Any, move: Callable[[Any], Any], *, keeps: bool) -> None:
        self.on_device = move(batch)  # for its shapes; not to be handed to user code
        self._batch = batch
        self._move = move
        self._keeps = keeps
        self._before: list[Hashable] | None = None

    def take(self) -> Any:
        """Return the batch for one computation.

        Raises:
            WrittenError: it is taken again, and the first computation has, or may have, changed it.
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
    """Return a leaf of a batch that nobody else writes: tensors with the strides they have."""
    if _is_fixed(leaf):
        return leaf
    if not isinstance(leaf, torch.Tensor):
        try:
            return copy.deepcopy(leaf)
        except Exception:  # an object of the user's that has no copy: then it is shared
            return leaf
    if leaf.layout is not torch.strided or leaf.is_conj() or leaf.is_neg() or leaf.is_nested:
        return leaf.clone()
    # Kernels, and so bits, may go by strides; clone() keeps only those without gaps.
    extent = sum((n - 1) * step for n, step in zip(leaf.shape, leaf.stride(), strict=True)) + 1
    if leaf.numel() == 0 or extent == leaf.numel() or extent > 2 * leaf.numel():
        return leaf.clone()
    window = leaf.detach().as_strided((extent,), (1,)).clone()
    return window.as_strided(leaf.shape, leaf.stride())


def _states(batch: Any) -> list[Hashable]:
    """Return what is another list once something in a batch was written, or may have been."""
    if type(batch) is list and _is_of_tensors(batch) and not any(map(_IS_INFERENCE, batch)):
        return [*versions(batch)]
    return [_state(leaf) for leaf in leaves(batch)]


def _state(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        # Of a tensor of inference_mode torch does not count writes.
        return object() if leaf.is_inference() else version(leaf)
    return None if _is_fixed(leaf) else object()


def _is_of_tensors(parts: list[Any]) -> bool:
    """Return whether all parts are plain tensors, without a line of Python for each."""
    return {*map(type, parts)} == _TENSORS


def _is_fixed(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, (str, bytes, range, Number))
