"""Extents: an update has whole vectors or a rank's slices; both check and sum over all elements.

A norm is summed over blocks of a fixed size first, then over the blocks in order: so the norm is
the same number wherever vectors are cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from quorate.coordination.ownership import BLOCK
from quorate.engines.collective.exchange import GradientExchange
from quorate.replica.flat import Flat
from quorate.replica.shard_sum import ShardSum
from quorate.training.optimizing.mean import Addition, make_mean, squares
from quorate.training.optimizing.not_finite import is_finite, not_finite


class Mean(NamedTuple):
    """The mean gradient of an update."""

    gradient: Flat
    is_finite: bool  # True if loss and gradient of the sum are finite; else the mean is unused
    norm: float | None  # over all elements, summed in float64; None if not wanted


class Whole:
    """An update of whole vectors."""

    def mean(
        self,
        total: ShardSum,
        additions: Sequence[Addition],
        device: torch.device,
        *,
        wants_norm: bool,
        cores: int,
    ) -> Mean:
        """Make the mean gradient of a sum, on a device.

        Args:
            total: the sum. Its gradient is complete after the additions.
            additions: additions of gradients, in order.
            cores: the largest number of cores to use.
        """
        gradient = total.gradient
        assert gradient is not None
        loss_is_finite = math.isfinite(total.metrics["loss"])
        is_on_host = gradient.is_on_host and device.type == "cpu"
        for left, right in additions:
            is_on_host = is_on_host and left.is_on_host and right.is_on_host
        if not is_on_host:
            return self._by_device(total, additions, device, wants_norm=wants_norm)
        found = make_mean(
            gradient,
            additions,
            total.weight,
            checks=True,
            wants_squares=wants_norm and loss_is_finite,
            cores=cores,
        )
        is_alright = found.is_finite and loss_is_finite
        norm = root(found.squares) if wants_norm and is_alright else None
        return Mean(gradient, is_alright, norm)

    def _by_device(
        self,
        total: ShardSum,
        additions: Sequence[Addition],
        device: torch.device,
        *,
        wants_norm: bool,
    ) -> Mean:
        """Make the mean gradient by operations on whole vectors, which are fastest on a GPU."""
        assert total.gradient is not None
        for left, right in additions:
            left.add_(right)
        if not is_finite(total):
            return Mean(total.gradient, False, None)
        gradient = total.gradient.on(device)
        gradient.div_(total.weight)
        norm = root([squares(vector) for vector in gradient.stretches]) if wants_norm else None
        return Mean(gradient, True, norm)

    def not_finite(self, gradient: Flat) -> list[str]:
        """Return the names of the parameters whose gradient has a non-finite element."""
        return not_finite(gradient)


class Sliced:
    """An update of a rank's slices, made by all ranks together.

    Args:
        exchange: the exchange of gradients, source of the slices.
    """

    def __init__(self, exchange: GradientExchange) -> None:
        self._exchange, self._slices = exchange, exchange.slices

    def mean(
        self,
        total: ShardSum,
        additions: Sequence[Addition],
        device: torch.device,
        *,
        wants_norm: bool,
        cores: int,
    ) -> Mean:
        """Make this rank's slices of the mean gradient of a sum. All ranks call the method.

        Args:
            total: the sum. Ranks have added its gradient, and exchanged whether the gradient is
                finite.
            additions: none.
            device: the device of the mean.
            cores: the largest number of cores to use.
        """
        assert total.gradient is not None
        assert not additions
        gradient = total.gradient.on(device)
        if not (self._exchange.is_finite and math.isfinite(total.metrics["loss"])):
            return Mean(gradient, False, None)
        found = make_mean(
            gradient,
            (),
            total.weight,
            checks=False,
            wants_squares=wants_norm,
            cores=cores,
        )
        return Mean(gradient, True, self._norm(found.squares) if wants_norm else None)

    def not_finite(self, gradient: Flat) -> list[str]:
        """Return the names of parameters whose gradient has a non-finite element on any rank."""
        odd = []
        for section in self._slices.whole.sections.values():
            vector, end = gradient.vectors[section.vector], section.start + section.span
            parts = self._slices.within(range(section.start, end), section.vector)
            if not all(bool(vector[p.at : p.at + p.length].isfinite().all()) for p in parts):
                odd.append(section.name)
        found = self._gathered(odd)
        return [name for name in self._slices.whole.sections if any(name in odd for odd in found)]

    def _norm(self, own: list[list[float]]) -> float:
        """Return the norm over all elements of all ranks, from squares of this rank's blocks."""
        found = self._gathered(own)
        by_vector = []
        for vector, owned in enumerate(self._slices.of):
            blocks: dict[int, float] = {}
            for stretches, norms in zip(owned, found, strict=True):
                starts = (start for part in stretches for start in part[::BLOCK])
                blocks.update(zip(starts, norms[vector], strict=True))
            by_vector.append([blocks[start] for start in sorted(blocks)])
        return root(by_vector)

    def _gathered(self, own: object) -> list[Any]:
        return self._slices.ranks.gather(own)


def root(vectors: Sequence[Sequence[float]]) -> float:
    """Return the norm of vectors, from the squared norms of the blocks of each, in order."""
    total = 0.0
    for blocks in vectors:
        for block in blocks:
            total += block
    return float(total**0.5)
