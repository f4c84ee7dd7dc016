"""The digest of a model: equal digests, equal bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch


def digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over names, shapes, dtypes and raw bytes, in the order given, as hexadecimal.

    Per tensor: its name, its shape as ``(10, 5)``, its dtype as ``torch.float32``, each followed by
    a NUL, then its elements' bytes in row-major order, whatever the memory format.
    """
    total = hashlib.sha256()
    for name, tensor in tensors:
        total.update(f"{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode())
        total.update(content(tensor).data)
    return total.hexdigest()


def content(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the raw bytes of a tensor's elements, (bytes,) uint8, in row-major order."""
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    # A conjugate may be the elements with a note that they are to be read as such.
    flat = dense.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()
