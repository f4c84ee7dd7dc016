"""Hashes of values: equal hashes mean equal bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from quorate.replica.digest import content
from quorate.replica.nested import parts


def tensor_text(tensor: torch.Tensor) -> str:
    """Return dtype, shape, and a hash over the elements: ``float32[64, 10] 9f86d081884c7d65``.

    For a single element, the value replaces the hash.
    """
    kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    try:
        if tensor.numel() == 1 and tensor.layout is torch.strided:
            return f"{kind} {tensor.item()!r}"
        elements = content(tensor)
    except (RuntimeError, NotImplementedError, TypeError):  # inside of vmap, quantized, nested
        return kind
    return f"{kind} {hashlib.blake2b(elements.data, digest_size=8).hexdigest()}"


def value_hash(value: object) -> str:
    """Return a hash over tensors, numbers and strings in nested containers, 16 hex digits.

    All other objects are hashed by type only.
    """
    total = hashlib.blake2b(digest_size=8)
    for piece in pieces(value):
        total.update(f"{piece};".encode())
    return total.hexdigest()


def extent_text(tensor: torch.Tensor) -> str | None:
    """Return the part of the memory covered by a tensor, as text; None for all of the memory."""
    try:
        if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
            return None
    except (RuntimeError, NotImplementedError):  # no ordinary memory
        return None
    by = ", ".join(map(str, tensor.stride()))
    return f"elements from {tensor.storage_offset()} on, by {by or 1}"


def pieces(value: Any) -> Iterator[str]:
    """Yield the parts of a value as text: tensors, numbers, strings, and types of other objects."""
    if isinstance(value, torch.Tensor):
        yield tensor_text(value)
    elif (inner := parts(value)) is not None:
        by_name = isinstance(value, Mapping)
        yield f"{len(value)} {'by name' if by_name else 'in a row'}"
        for name, part in inner:
            if by_name:
                yield repr(name)
            yield from pieces(part)
    elif isinstance(value, (str, bytes, int, float, complex, type(None))):
        yield repr(value)
    elif isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        yield str(value)
    else:
        yield type(value).__name__
