"""Entries of an optimizer's state, as ranks describe them to each other: per element, or single."""

from __future__ import annotations

from typing import Any

import torch

from quorate.engines.collective.rank_slices import SlicePart
from quorate.replica.torch_internals import version


def part(value: torch.Tensor, place: SlicePart) -> torch.Tensor:
    """Return a stretch of a vector."""
    return value[place.start : place.start + place.length]


def cut(value: torch.Tensor, place: SlicePart, piece: torch.Tensor) -> torch.Tensor:
    """Return a copy of a stretch of an entry; uninitialized memory if the entry is not read yet."""
    if value.is_meta:
        return torch.empty(place.length, dtype=value.dtype, device=piece.device)
    return part(value, place).clone()


def end(tensor: torch.Tensor) -> int:
    """Return the address behind a vector."""
    return tensor.data_ptr() + tensor.numel() * tensor.element_size()


def is_like(value: object, tensor: torch.Tensor) -> bool:
    """Return whether an entry has a value for each element."""
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape and value.dim() > 0


class Same:
    """An identity: compares equal to a ``Same`` of the same object.

    The object is kept alive, so that its id is not reused.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other._value is self._value


def marks(value: Any) -> list[Any]:
    """Return marks that change if a tree changes: its tensors, and how often each was written."""
    if isinstance(value, torch.Tensor):
        return [Same(value), version(value)]
    if isinstance(value, dict):
        return [mark for key, item in value.items() for mark in (Same(key), *marks(item))]
    if isinstance(value, (list, tuple)):
        return [mark for item in value for mark in marks(item)]
    return [value if isinstance(value, (bool, int, float, str)) else Same(value)]


def told(value: Any, tensor: torch.Tensor) -> list[Any]:
    """Return an entry's dtype, its value ("piece" if the value is sent), and its device."""
    if not isinstance(value, torch.Tensor):
        return [None, value, ""]
    dtype = str(value.dtype).removeprefix("torch.")
    if is_like(value, tensor):
        return [dtype, "piece", ""]
    return [dtype, value.tolist(), _on(value)]


def copied(value: Any) -> Any:
    """Return a copy of an entry."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def described(value: Any, piece: torch.Tensor | None) -> list[Any]:
    """Return an entry's dtype, shape or "piece", plain value if not a tensor, and device."""
    if not isinstance(value, torch.Tensor):
        return [None, None, value, ""]
    assert piece is not None
    shape = "piece" if is_like(value, piece) else list(value.shape)
    return [str(value.dtype).removeprefix("torch."), shape, None, _on(value)]


def _on(value: torch.Tensor) -> str:
    return "cpu" if value.device.type == "cpu" else "device"
