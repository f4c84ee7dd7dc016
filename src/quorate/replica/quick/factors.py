"""Factors as tensors that are kept: torch makes a tensor of a number in each product with one.

That takes longer than the product, where a vector is short. And factors in the place of divisors.
"""

from __future__ import annotations

from functools import lru_cache
from math import frexp

import torch

_EXACT = (torch.float32, torch.float64)  # of a narrower one kernels are given float32


def as_factor(number: float, vector: torch.Tensor) -> torch.Tensor | float:
    """Return what a vector is multiplied by, with the bits of a product with the number."""
    # Zero is one key, and two factors.
    if number == 0 or not vector.is_cpu or vector.dtype not in _EXACT:
        return number
    return factor_of(number, vector.dtype)


@lru_cache(maxsize=64)
def exact_inverse(divisor: float, dtype: torch.dtype) -> float | None:
    """Return 1 / 2**k of 2**k: a product of a dtype with it is the quotient, to the bit; else None.

    It takes half the time.
    """
    if dtype not in _EXACT:
        return None
    inverse = 1 / divisor
    return inverse if frexp(divisor)[0] == frexp(inverse)[0] == 0.5 else None


@lru_cache(maxsize=64)
def factor_of(number: float, dtype: torch.dtype) -> torch.Tensor:
    """Return a number as a scalar tensor of the host. Zero and minus zero are the same one."""
    with torch.inference_mode(False):
        return torch.tensor(number, dtype=dtype, device="cpu")
