"""Closures: what an optimizer is given that wants the gradient of a step at other parameters too.

LBFGS asks for it at several points of a step, sharpness-aware optimizers at one more.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch.optim import Optimizer

from quorate.replica.flat import Flat


class Closure:
    """What an optimizer's ``step()`` is given.

    The gradient of the step was computed before: asked for at the same parameters, as most
    optimizers with an optional closure do first, it is there already.

    Args:
        loss: of the step, at the parameters as they are.
        parameters: that the optimizer moves.
        compute: computes gradients at the parameters as they are, and returns the loss.
    """

    def __init__(self, loss: float, parameters: Flat, compute: Callable[[], float]) -> None:
        self._loss = loss
        self._parameters = parameters
        self._before = parameters.layout.new(parameters.device)
        self._compute = compute
        self._has_moved = False

    def begin(self) -> None:
        """Note what the parameters are: the optimizer's step begins."""
        self._before.copy_(self._parameters)

    def __call__(self) -> torch.Tensor:
        """Return the loss, a float64 scalar; the parameters have their gradients."""
        self._has_moved = self._has_moved or any(
            not torch.equal(now, before)
            for now, before in zip(self._parameters.vectors, self._before.vectors, strict=True)
        )
        if self._has_moved:
            self._loss = self._compute()
        return torch.tensor(self._loss, dtype=torch.float64)


def takes_closure(optimizer: Optimizer) -> bool:
    """Whether ``step()`` may be given one: torch's own would all compute the gradient twice."""
    if type(optimizer).__module__.partition(".")[0] == "torch":
        return needs_closure(optimizer)
    return "closure" in inspect.signature(type(optimizer).step).parameters


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether ``step()`` cannot be called without one, as far as that can be seen."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return True
    return hasattr(optimizer, "first_step")  # as sharpness-aware ones have it
