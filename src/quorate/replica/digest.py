"""The digest of a model: equal digests mean equal bits.

Digests are made of tensors, or of the bytes of tensors in a file. The latter needs no torch, whose
import takes longer than the digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import torch


class TensorBytes(NamedTuple):
    """A tensor as plain bytes."""

    name: str
    shape: Sequence[int]
    dtype: str  # torch's name: "torch.float32"
    pieces: Iterable[bytes | memoryview]  # the bytes of its elements, row-major, little-endian


def digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the digest of named tensors, in the given order; see ``digest_of_bytes``."""
    return digest_of_bytes(_bytes_of(name, tensor) for name, tensor in tensors)


def digest_of_bytes(tensors: Iterable[TensorBytes]) -> str:
    """Return SHA-256 over names, shapes, dtypes and raw bytes, in the given order, as hexadecimal.

    Per tensor: the name, the shape as ``(10, 5)``, the dtype as ``torch.float32``, each followed by
    a NUL, then the bytes of the elements in row-major order, for any memory format.
    """
    total = hashlib.sha256()
    for name, shape, dtype, pieces in tensors:
        total.update(f"{name}\0{tuple(shape)}\0{dtype}\0".encode())
        for piece in pieces:
            total.update(piece)
    return total.hexdigest()


def content(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the raw bytes of a tensor's elements, (bytes,) uint8, in row-major order."""
    import torch

    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    # A conjugate may be stored as the original elements with a flag.
    return flat_bytes(dense.resolve_conj().resolve_neg().cpu()).numpy()


def flat_bytes(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements, row by row: a view if possible."""
    import torch

    dense = values.contiguous()
    # A tensor of one element is contiguous with any stride, but only stride 1 can be viewed as
    # bytes.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def same_bits(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Return, for each pair of tensors on any devices, whether shape, dtype and bits are equal.

    Waits once for each accelerator with a first tensor of a pair.
    """
    import torch

    found: list[bool] = []
    late: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}  # with the numbers of pairs
    for number, (one, other) in enumerate(pairs):
        found.append(False)
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            continue
        mine, theirs = flat_bytes(one.detach()), flat_bytes(other.detach()).to(one.device)
        if one.device.type == "cpu":
            found[number] = torch.equal(mine, theirs)
        else:
            late.setdefault(one.device, []).append((number, (mine == theirs).all()))
    for answers in late.values():
        told = torch.stack([answer for _, answer in answers]).tolist()
        for (number, _), answer in zip(answers, told, strict=True):
            found[number] = answer
    return found


def _bytes_of(name: str, tensor: torch.Tensor) -> TensorBytes:
    return TensorBytes(name, tuple(tensor.shape), str(tensor.dtype), (content(tensor).data,))
