"""A model's parameters: which of them train, where they lie, and copies that lie elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from quorate.errors import CopyError
from quorate.replica.flat import Flat
from quorate.replica.spread import Scattered

MOST_KEPT = 1 << 23


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that want a gradient, by the user's names; tied ones once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def frozen(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that want no gradient, by the user's names."""
    return {name: p for name, p in model.named_parameters() if not p.requires_grad}


@contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Let a replica be made of the model itself; after the block the model is as it was.

    That is its modes, its buffers, its frozen parameters of up to ``MOST_KEPT`` elements, and where
    the trainable ones lie.
    """
    modes = [(module, module.training) for module in model.modules()]
    lies_in = [(parameter, parameter.data) for parameter in trainable(model).values()]
    tensors = [*model.buffers(), *(p for p in frozen(model).values() if p.numel() <= MOST_KEPT)]
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, data in lies_in:
            parameter.data = data
        for tensor, value in zip(tensors, before, strict=True):
            tensor.data.copy_(value)


def bind(parameters: Mapping[str, torch.nn.Parameter], flat: Flat | Scattered) -> None:
    """Make parameters views of the flat vectors."""
    for name, parameter in parameters.items():
        parameter.data = flat.views[name]


def copy_of(
    model: torch.nn.Module,
    parameters: Mapping[str, torch.Tensor],
    shares: torch.device | None,
    mutable_frozen: Collection[int],
) -> torch.nn.Module:
    """Return a deep copy of a model whose trainable parameters are the given ones.

    Frozen parameters on the device ``shares`` are shared: nobody changes them, but for those
    that a forward pass writes.
    """
    memo: dict[int, Any] = {
        id(p): p
        for number, p in enumerate(model.parameters())
        if p.device == shares and not p.requires_grad and number not in mutable_frozen
    }
    for name, parameter in trainable(model).items():
        # By .data: else writes to any copy would count as writes to all of them.
        memo[id(parameter)] = torch.nn.Parameter(parameters[name].data)
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise CopyError(
            "model",
            type(model).__name__,
            "a module that copy.deepcopy can copy, as every tower has a copy of its own",
            f"use engine='processes', where none is needed; deepcopy said: {error}",
        ) from error
    # A model with a way of its own to be copied may make its parameters anew (Keras).
    theirs = trainable(copied)
    if [*theirs] != [*parameters] or any(
        theirs[name].data_ptr() != view.data_ptr() for name, view in parameters.items()
    ):
        raise CopyError(
            "model",
            type(model).__name__,
            "a module whose deep copy has the parameters that deepcopy is told to give it",
            "use engine='processes', where no copy is needed",
        )
    return copied
