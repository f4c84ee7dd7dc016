"""Whether everything in a gradient is a finite number, and if not, whose it is."""

from __future__ import annotations

import math

import torch

from quorate.replica.flat import Flat
from quorate.replica.shard_sum import ShardSum


def is_finite(total: ShardSum) -> bool:
    """Whether loss and gradient of a sum are finite. One pass over the gradient.

    Not its buffers: a mask for attention is one, and full of infinities.
    """
    is_alright = total.gradient is None or are_finite(total.gradient)
    return math.isfinite(total.metrics["loss"]) and is_alright


def are_finite(gradient: Flat) -> bool:
    """Whether everything in some vectors is finite. One pass over them."""
    return all(is_all_finite(vector) for vector in gradient.stretches)


def not_finite(gradient: Flat) -> list[str]:
    """Return the parameters whose gradient is not finite everywhere."""
    by_rows = {name: rows.values for name, rows in gradient.rows.items()}
    named = {**gradient.views, **by_rows}
    return [name for name, values in named.items() if not is_all_finite(values)]


def is_all_finite(values: torch.Tensor) -> bool:
    """Whether each element is a finite number. One pass over them."""
    if not values.numel():
        return True
    if values.is_complex():
        values = torch.view_as_real(values)
    # A sum with an infinity or a nan in it is one. It may also overflow by itself: only then the
    # extremes are looked at, which take twice as long. No temporary tensor, unlike isfinite().
    if math.isfinite(values.sum()):
        return True
    return all(math.isfinite(extreme) for extreme in torch.aminmax(values))
