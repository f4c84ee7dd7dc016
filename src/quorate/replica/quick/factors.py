"""Factors as tensors that are kept: torch makes a tensor of a number in each product with one.

That takes longer than the product, where a vector is short.
"""

from __future__ import annotations

from functools import lru_cache

import torch

_EXACT = (torch.float32, torch.float64)  # of a narrower one kernels are given float32


def as_factor(number: float, vector: torch.Tensor) -> torch.Tensor | float:
    """Return what a vector is multiplied by, with the bits of a product with the number."""
    # Zero is one key, and two factors.
    if number == 0 or not vector.is_cpu or vector.dtype not in _EXACT:
        return number
    return _tensor(number, vector.dtype)


@lru_cache(maxsize=64)
def _tensor(number: float, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(number, dtype=dtype, device="cpu")
