"""Extents: whether an update has whole vectors or a rank's slices, and what has to see all of them.

A norm is summed over blocks of a fixed size first, then over the blocks in their order: so it is
the same number wherever vectors are cut.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch

from quorate.coordination.ownership import BLOCK
from quorate.replica.flat import Flat
from quorate.replica.shard_sum import ShardSum
from quorate.training.optimizing.not_finite import is_finite, not_finite
from quorate.transports.collective.exchange import Exchange


class Whole:
    """The update has whole vectors."""

    def is_finite(self, total: ShardSum) -> bool:
        """Return whether loss and gradient of a sum are finite."""
        return is_finite(total)

    def not_finite(self, gradient: Flat) -> list[str]:
        """Return the parameters whose gradient is not finite everywhere."""
        return not_finite(gradient)

    def norm(self, gradient: Flat) -> float:
        """Return the norm over all elements, summed in float64."""
        return root([squares(vector) for vector in gradient.vectors])


class Sliced:
    """The update has a rank's slices, and all ranks make it together.

    Args:
        exchange: that they come from.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self._slices = exchange, exchange.slices

    def is_finite(self, total: ShardSum) -> bool:
        """Return whether loss and gradient of a sum are finite, on all ranks."""
        return self._exchange.is_finite and math.isfinite(total.metrics["loss"])

    def not_finite(self, gradient: Flat) -> list[str]:
        """Return the parameters whose gradient is not finite everywhere, on any rank."""
        odd = []
        for section in self._slices.whole.sections.values():
            vector, end = gradient.vectors[section.vector], section.start + section.span
            parts = self._slices.within(range(section.start, end), section.vector)
            if not all(bool(vector[p.at : p.at + p.length].isfinite().all()) for p in parts):
                odd.append(section.name)
        found = self._gathered(odd)
        return [name for name in self._slices.whole.sections if any(name in odd for odd in found)]

    def norm(self, gradient: Flat) -> float:
        """Return the norm over all elements of all ranks, summed in float64."""
        found = self._gathered([squares(vector) for vector in gradient.vectors])
        by_vector = []
        for vector, owned in enumerate(self._slices.of):
            blocks: dict[int, float] = {}
            for stretches, norms in zip(owned, found, strict=True):
                starts = (start for part in stretches for start in part[::BLOCK])
                blocks.update(zip(starts, norms[vector], strict=True))
            by_vector.append([blocks[start] for start in sorted(blocks)])
        return root(by_vector)

    def _gathered(self, own: object) -> list[Any]:
        packed = json.dumps(own).encode()
        return [json.loads(text) for text in self._slices.ranks.gather(packed)]


def squares(vector: torch.Tensor) -> list[float]:
    """Return the squared norm of each block of a vector."""
    wide = torch.float32 if vector.device.type == "mps" else torch.float64  # which it lacks
    norms = [
        torch.linalg.vector_norm(torch.view_as_real(b) if b.is_complex() else b, dtype=wide)
        for b in torch.split(vector, BLOCK)
        if b.numel()
    ]
    found: list[float] = torch.stack(norms).double().cpu().square().tolist() if norms else []
    return found


def root(vectors: Sequence[Sequence[float]]) -> float:
    """Return the norm of vectors, from the squared norms of the blocks of each, in their order."""
    total = 0.0
    for blocks in vectors:
        for block in blocks:
            total += block
    return float(total**0.5)
