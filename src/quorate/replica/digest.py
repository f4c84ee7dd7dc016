"""The digest of a model: equal digests, equal bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch


def digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over names, shapes, dtypes and raw bytes, in the order given, as hexadecimal.

    Per tensor: its name, its shape as ``(10, 5)``, its dtype as ``torch.float32``, each followed by
    a NUL, then its elements' bytes in row-major order, whatever the memory format.
    """
    total = hashlib.sha256()
    for name, tensor in tensors:
        total.update(f"{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        total.update(flat.view(torch.uint8).numpy().data)
    return total.hexdigest()
