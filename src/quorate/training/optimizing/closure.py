"""Closures, and the optimizers that ask for the gradient of a step again at moved parameters.

LBFGS evaluates the gradient at several points of a step, sharpness-aware optimizers at two.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch.optim import Optimizer

from quorate.training.optimizing.attributes import optimizers

# Sets the gradients of the parameters, and returns the loss, a float64 scalar.
Closure = Callable[[], torch.Tensor]


def takes_closure(optimizer: Optimizer) -> bool:
    """Return whether ``step()`` receives a closure.

    For most of torch's optimizers, a closure would compute every gradient twice.
    """
    if type(optimizer).__module__.partition(".")[0] == "torch":
        return needs_closure(optimizer)
    parameters = inspect.signature(type(optimizer).step).parameters
    passes_on = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters.values())
    return "closure" in parameters or (passes_on and needs_closure(optimizer))


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer, or a nested optimizer, requires a closure, as far as visible."""
    return any(map(_needs_closure, optimizers(optimizer)))


def _needs_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return True
    return hasattr(optimizer, "first_step")  # the convention of sharpness-aware optimizers
