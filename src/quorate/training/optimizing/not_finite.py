"""Checks whether all elements of a gradient are finite, and finds the parameters if not."""

from __future__ import annotations

import math

import torch

from quorate.replica.flat import Flat
from quorate.replica.shard_sum import ShardSum


def is_finite(total: ShardSum) -> bool:
    """Return whether loss and gradient of a sum are finite. Makes one pass over the gradient.

    Buffers are not checked: an attention mask is a buffer, and full of infinities.
    """
    is_alright = total.gradient is None or are_finite(total.gradient)
    return math.isfinite(total.metrics["loss"]) and is_alright


def are_finite(gradient: Flat) -> bool:
    """Return whether all elements of a gradient are finite. Makes one pass over the vectors."""
    return all(is_all_finite(vector) for vector in gradient.stretches)


def not_finite(gradient: Flat) -> list[str]:
    """Return the names of the parameters whose gradient has a non-finite element."""
    by_rows = {name: rows.values for name, rows in gradient.rows.items()}
    named = {**gradient.views, **by_rows}
    return [name for name, values in named.items() if not is_all_finite(values)]


def is_all_finite(values: torch.Tensor) -> bool:
    """Return whether each element is a finite number. Makes one pass over the elements."""
    if not values.numel():
        return True
    if values.is_complex():
        values = torch.view_as_real(values)
    # A sum with an infinity or a NaN is not finite. A finite sum may also overflow: only then the
    # extremes are computed, in twice the time. No temporary tensor, unlike isfinite().
    if math.isfinite(values.sum()):
        return True
    return all(math.isfinite(extreme) for extreme in torch.aminmax(values))
