"""Parcels of outputs: from a worker process to the coordinator, without pickling.

The bytes of tensors lie in memory without a name, whose descriptor is sent with the message; the
nesting, and values that are no tensors, are JSON in the message itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from quorate.machine.shared_memory import Segment

_ALIGNMENT = 64  # bytes: alignment of torch's allocations
Memory = Segment | bytes  # bytes, where a worker is on another host


def packed(value: Any) -> tuple[Any, Segment | None]:
    """Return a description for JSON, and memory with all tensors; None without elements.

    Args:
        value: a result of ``rows.checked``.

    Raises:
        UserError: the machine cannot provide the memory.
    """
    tensors: list[tuple[torch.Tensor, int]] = []
    end = 0

    def described(part: Any) -> Any:
        nonlocal end
        if isinstance(part, torch.Tensor):
            start, end = end, end + _up(part.nbytes)
            tensors.append((part, start))
            return {"tensor": [str(part.dtype).removeprefix("torch."), list(part.shape), start]}
        if isinstance(part, dict):
            return {"dict": {key: described(inner) for key, inner in part.items()}}
        if isinstance(part, list | tuple):
            return {type(part).__name__: [described(inner) for inner in part]}
        return part

    description = described(value)
    if end == 0:
        return description, None
    memory = Segment(end)
    for tensor, start in tensors:
        there = memory.tensor(tensor.dtype, tensor.numel(), start)
        there.copy_(tensor.reshape(-1))
    return description, memory


def unpacked(description: Any, memory: Memory | None) -> Any:
    """Return the packed value; its tensors are views of the memory, and keep the memory alive."""
    whole: torch.Tensor | None = None
    if isinstance(memory, bytes):
        whole = torch.frombuffer(bytearray(memory), dtype=torch.uint8)
    elif memory is not None:
        whole = memory.tensor(torch.uint8, memory.nbytes, 0)

    def value_of(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        kind, inner = next(iter(part.items()))
        if kind == "dict":
            return {key: value_of(each) for key, each in inner.items()}
        if kind != "tensor":
            values = [value_of(each) for each in inner]
            return tuple(values) if kind == "tuple" else values
        name, shape, start = inner
        dtype: torch.dtype = getattr(torch, name)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        assert whole is not None
        return whole[start : start + nbytes].view(dtype).view(shape)

    return value_of(description)


def _up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
