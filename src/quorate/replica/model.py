"""A model's parameters: which of them train, and where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from quorate.replica.flat import Flat
from quorate.replica.spread import Scattered

MOST_KEPT = 1 << 20


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
