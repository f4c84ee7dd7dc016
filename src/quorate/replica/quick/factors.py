"""Factors as cached tensors: torch makes a tensor from a number in each product with a number.

For a short vector, making the tensor takes longer than the product. Also factors instead of
divisors.
"""

from __future__ import annotations

from functools import lru_cache
from math import frexp

import torch

_EXACT = (torch.float32, torch.float64)  # kernels of narrower dtypes receive float32


def as_factor(number: float, vector: torch.Tensor) -> torch.Tensor | float:
    """Return a factor for a vector, with the bits of a product with the number."""
    # Zero and minus zero are equal keys, but different factors.
    if number == 0 or not vector.is_cpu or vector.dtype not in _EXACT:
        return number
    return factor_of(number, vector.dtype)


@lru_cache(maxsize=64)
def exact_inverse(divisor: float, dtype: torch.dtype) -> float | None:
    """Return 1 / 2**k for 2**k: a product with it is the quotient, bit for bit; else None.

    The product takes half the time.
    """
    if dtype not in _EXACT:
        return None
    inverse = 1 / divisor
    return inverse if frexp(divisor)[0] == frexp(inverse)[0] == 0.5 else None


@lru_cache(maxsize=64)
def factor_of(number: float, dtype: torch.dtype) -> torch.Tensor:
    """Return a number as a scalar tensor on the host. Zero and minus zero share a cache entry."""
    with torch.inference_mode(False):
        return torch.tensor(number, dtype=dtype, device="cpu")
