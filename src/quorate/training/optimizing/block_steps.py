"""Steps in blocks: for optimizers without a fused kernel, over vectors larger than any cache.

Such a step is a dozen operations; each reads whole vectors and allocates new ones. If a step is
made block by block, intermediate vectors stay in a core's cache, and take no memory. The bits of an
element are the same, because blocks begin where vector registers begin too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from quorate.training.optimizing import cores as _cores
from quorate.training.optimizing.adam_kernel import step_by_kernel
from quorate.training.optimizing.bare_step import bare_step, is_counted
from quorate.training.optimizing.known_optimizers import is_by_element, piece_of_state, values_of
from quorate.training.optimizing.mean import SPAN

_State = dict[str, Any]


class _Stretch(NamedTuple):
    """A stretch of one of an optimizer's tensors."""

    group: dict[str, Any]
    tensor: torch.Tensor
    state: _State
    span: slice


def step_flat(optimizer: Optimizer, elements: int) -> bool:
    """Make a step of an element-wise optimizer whose tensors have their gradients.

    Args:
        elements: number of elements of the vectors of all parameters, on all ranks.

    Returns:
        Whether only torch's own code ran.
    """
    step = bare_step(optimizer)
    is_alone = step is not None or is_counted(optimizer)
    if is_alone and elements >= _cores.ALL_CORES_FROM and _can_be_cut(optimizer):
        _step_in_blocks(optimizer, _cores.cores_for(elements))
        if step is None:
            _step_of_nothing(optimizer)
    elif step is not None and step_by_kernel(optimizer):
        pass
    elif all(group.get("fused") for group in optimizer.param_groups):
        (step or optimizer.step)()
    else:
        # Fused kernels cut vectors between cache lines. Unfused operations cut vectors anywhere,
        # and the elements left over from a vector register may have other bits, for example in
        # bfloat16.
        with _cores.intra_op_threads(1):
            (step or optimizer.step)()
    return is_alone


def _can_be_cut(optimizer: Optimizer) -> bool:
    return all(
        not group.get("fused") and not group.get("capturable") and _is_begun(optimizer, tensor)
        for group in optimizer.param_groups
        for tensor in group["params"]
        if tensor.grad is not None
    )


def _step_in_blocks(optimizer: Optimizer, cores: int) -> None:
    blocks = list(_blocks(optimizer))

    def run(first: int, end: int) -> list[tuple[_State, _State]]:
        return _step(type(optimizer), blocks[first:end])

    for begun in _cores.side_by_side(run, len(blocks), cores):
        for state, counted in begun:
            for entry, value in counted.items():
                if isinstance(state[entry], torch.Tensor):
                    state[entry].copy_(value)
                else:
                    state[entry] = value


def _is_begun(optimizer: Optimizer, tensor: torch.Tensor) -> bool:
    """Return whether a tensor on the host has all its state: after a first step, but for SGD."""
    values = optimizer.state.get(tensor, {}).values()
    return tensor.device.type == "cpu" and len(values) > 0 and all(v is not None for v in values)


def _blocks(optimizer: Optimizer) -> Iterator[_Stretch]:
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if tensor.grad is not None:
                state = optimizer.state[tensor]
                for start in range(0, tensor.numel(), SPAN):
                    yield _Stretch(group, tensor, state, slice(start, start + SPAN))


def _step(kind: type[Optimizer], blocks: Sequence[_Stretch]) -> list[tuple[_State, _State]]:
    """Make the step of some blocks.

    Returns:
        For each tensor whose first block is among the blocks: its state, and the new values of the
            entries without an element per parameter element (counters).
    """
    counted = []
    for group, own_blocks in _by_group(blocks):
        nothing = torch.nn.Parameter(torch.empty(0))
        own = kind([{**values_of(group), "params": [nothing]}])  # type: ignore[call-arg]
        for block in own_blocks:
            entries = _step_of(own, block)
            if block.span.start == 0:
                counted.append((block.state, entries))
    return counted


def _step_of(own: Optimizer, block: _Stretch) -> _State:
    """Make the step of a block in place; return the state entries without a value per element."""
    tensor, span = block.tensor, block.span
    assert tensor.grad is not None
    piece = torch.nn.Parameter(tensor.detach()[span])
    piece.grad = tensor.grad[span]
    given = {
        entry: piece_of_state(entry, value, span.start, SPAN)
        for entry, value in block.state.items()
    }
    own.param_groups[0]["params"] = [piece]
    own.state.clear()
    own.state[piece] = dict(given)
    (bare_step(own) or own.step)()
    counted = {}
    for entry, value in own.state[piece].items():
        if not is_by_element(entry, value):
            counted[entry] = value
        elif value is not given[entry]:
            given[entry].copy_(value)
    return counted


def _by_group(blocks: Iterable[_Stretch]) -> Iterator[tuple[dict[str, Any], list[_Stretch]]]:
    found: dict[int, tuple[dict[str, Any], list[_Stretch]]] = {}
    for block in blocks:
        found.setdefault(id(block.group), (block.group, []))[1].append(block)
    yield from found.values()


def _step_of_nothing(optimizer: Optimizer) -> None:
    """Make a step without gradients, so that a schedule counts the step."""
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    gradients = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    optimizer.step()
    for tensor, gradient in zip(tensors, gradients, strict=True):
        tensor.grad = gradient
