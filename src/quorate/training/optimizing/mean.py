"""The mean gradient in a single pass over memory: sum, finite check, division, squared norms.

The update of a large model is bound by memory. So all operations are applied to a block of the
vectors while the block is in a core's cache, and each core has a run of blocks: a vector of each
part is read once, and the mean is written once. The operations on an element, and their order, are
those of an update by whole vectors: the bits do not depend on blocks or cores.

Legend: P elements of a vector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch

from quorate.coordination.ownership import BLOCK
from quorate.engines.partition import root
from quorate.machine.devices import has_float64
from quorate.replica.flat import Flat
from quorate.replica.quick.factors import as_factor, exact_inverse
from quorate.replica.quick.torch_calls import is_finite_times
from quorate.replica.shard_sum import ShardSum
from quorate.training.optimizing.cores import side_by_side
from quorate.training.optimizing.not_finite import is_all_finite, is_finite

Addition = tuple[Flat, Flat]  # left += right

# Elements: 512 KB of float32, half the usual size of a core's second-level cache. With smaller
# blocks, calls take more time than arithmetic. A multiple of the blocks of norms.
SPAN = 2 * BLOCK
FEW = 1 << 14  # up to this size, check and division are one operation; beyond, two are faster


class Mean(NamedTuple):
    """The mean gradient of an update."""

    gradient: Flat
    is_finite: bool  # True if loss and gradient of the sum are finite; else the mean is unused
    norm: float | None  # over all elements, summed in float64; None if not wanted


class MeanChecks(NamedTuple):
    """Results of the checks made during a pass over vectors."""

    is_finite: bool  # whether the sum is finite
    squares: list[list[float]]  # squared norm of each block of each vector of the mean


def mean_of_sum(
    total: ShardSum,
    additions: Sequence[Addition],
    device: torch.device,
    *,
    wants_norm: bool,
    cores: int,
) -> Mean:
    """Make the mean gradient of a sum of whole vectors, on a device.

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
        return _mean_by_device(total, additions, device, wants_norm=wants_norm)
    found = make_mean(
        gradient,
        additions,
        total.divisor,
        checks=True,
        wants_squares=wants_norm and loss_is_finite,
        cores=cores,
    )
    is_alright = found.is_finite and loss_is_finite
    norm = root(chain.from_iterable(found.squares)) if wants_norm and is_alright else None
    return Mean(gradient, is_alright, norm)


def clip_scale(most: float, norm: float) -> float:
    """Return the factor that scales a gradient down to a norm, as torch's clip_grad_norm_ does.

    Args:
        most: the largest norm.
        norm: the norm of the gradient.
    """
    return min(1.0, most / (norm + 1e-6))


def _mean_by_device(
    total: ShardSum, additions: Sequence[Addition], device: torch.device, *, wants_norm: bool
) -> Mean:
    """Make the mean gradient by operations on whole vectors, which are fastest on a GPU."""
    assert total.gradient is not None
    for left, right in additions:
        left.add_(right)
    if not is_finite(total):
        return Mean(total.gradient, False, None)
    gradient = total.gradient.on(device)
    gradient.div_(total.divisor)
    found = chain.from_iterable(map(squares, gradient.stretches)) if wants_norm else None
    return Mean(gradient, True, None if found is None else root(found))


def make_mean(
    gradient: Flat,
    additions: Sequence[Addition],
    weight: float,
    *,
    checks: bool,
    wants_squares: bool,
    cores: int,
) -> MeanChecks:
    """Add the vectors of one device, and divide the sum; the mean is written to ``gradient``.

    Args:
        additions: additions in order; the last one adds to ``gradient``.
        checks: whether to check if the sum is finite.
        wants_squares: whether the norm of the mean is wanted.
    """
    for left, right in additions:
        left.add_rows(right)
    is_finite, by_vector = True, list[list[float]]()
    for number, total in enumerate(gradient.vectors):
        operands = list[torch.Tensor]()
        if additions:
            operands = [flat.vectors[number] for pair in additions for flat in pair]
        if total.numel() <= SPAN or not total.is_cpu:  # blocks are of no use on a GPU
            columns = [(operand,) for operand in operands] if operands else ()
            finite, squared = _pass((total,), columns, weight, checks, wants_squares)
        else:
            seen = _on_cores(total, operands, weight, checks, wants_squares, cores)
            finite = all(finite for finite, _ in seen)
            squared = [each for _, squared in seen for each in squared]
        is_finite = is_finite and finite
        by_vector.append(squared)
    for rows in gradient.stretches[len(gradient.vectors) :] if gradient.rows else ():  # few
        finite, squared = _pass((rows,), (), weight, checks, wants_squares)
        is_finite = is_finite and finite
        by_vector.append(squared)
    return MeanChecks(is_finite, by_vector)


def squares(vector: torch.Tensor) -> list[float]:
    """Return the squared norm of each block of a vector."""
    return squares_of(torch.split(vector, BLOCK)) if vector.numel() else []


def squares_on_cores(blocks: Sequence[torch.Tensor], cores: int) -> list[float]:
    """Return the squared norm of each block, computed on some cores; the bits are the same."""
    # A device's work belongs to the stream of this thread.
    cores = cores if all(block.is_cpu for block in blocks[:1]) else 1

    def run(first: int, end: int) -> list[float]:
        return squares_of(blocks[first:end])

    return [*chain.from_iterable(side_by_side(run, len(blocks), cores))]


def squares_of(blocks: Sequence[torch.Tensor]) -> list[float]:
    """Return the squared norm of each block; blocks lie on one device, and none is empty."""
    wide = torch.float64 if blocks and has_float64(blocks[0].device) else torch.float32
    norms = [
        torch.linalg.vector_norm(torch.view_as_real(b) if b.is_complex() else b, dtype=wide)
        for b in blocks
    ]
    found: list[float] = torch.stack(norms).cpu().double().square().tolist() if norms else []
    return found


_Seen = tuple[bool, list[float]]


def _on_cores(
    total: torch.Tensor,
    operands: Sequence[torch.Tensor],
    weight: float,
    checks: bool,
    wants_squares: bool,
    cores: int,
) -> list[_Seen]:
    """Make the pass over a long vector on several cores. Return the results in order."""
    blocks = torch.split(total, SPAN)
    columns = [torch.split(each, SPAN) for each in operands]

    def run(first: int, end: int) -> _Seen:
        own = [column[first:end] for column in columns]
        return _pass(blocks[first:end], own, weight, checks, wants_squares)

    return side_by_side(run, len(blocks), cores)


def _pass(
    blocks: Sequence[torch.Tensor],
    operands: Sequence[Sequence[torch.Tensor]],
    weight: float,
    checks: bool,
    wants_squares: bool,
) -> _Seen:
    """Make the mean of some blocks.

    Args:
        operands: left and right operand of each addition in turn, each as blocks.
    """
    is_finite, squared = True, list[float]()
    factor = exact_inverse(weight, blocks[0].dtype)
    for number, block in enumerate(blocks):
        for left, right in zip(operands[::2], operands[1::2], strict=True) if operands else ():
            left[number].add_(right[number])
        finite: bool | None = None
        if checks and factor is not None and block.numel() <= FEW:
            finite = is_finite_times(block, factor)  # None: not multiplied
        if finite is None:
            finite = not checks or is_all_finite(block)
            if factor is not None:
                block.mul_(as_factor(factor, block))
            else:
                block.div_(weight)
        is_finite = is_finite and finite
        if wants_squares:
            squared += squares(block)
    return is_finite, squared
