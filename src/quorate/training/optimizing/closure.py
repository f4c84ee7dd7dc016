"""Closures: what an optimizer is given that wants the gradient of a step at other parameters too.

LBFGS asks for it at several points of a step, sharpness-aware optimizers at one more.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch.optim import Optimizer

from quorate.replica.flat import Flat
from quorate.training.optimizing.attributes import optimizers


class Closure:
    """What an optimizer's ``step()`` is given.

    The gradient of the step was computed before: asked for at the same parameters, as most
    optimizers with an optional closure do first, it is there already.

    Args:
        known: puts the gradient at the parameters as they are now into them, and returns the loss.
        parameters: that the optimizer moves.
        compute: computes gradients at the parameters as they are, and returns the loss.
        at_home: within it ``parameters`` have the optimizer's values, wherever it put those.
    """

    def __init__(
        self,
        known: Callable[[], float],
        parameters: Flat,
        compute: Callable[[], float],
        at_home: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._known = known
        self._parameters = parameters
        self._before = parameters.layout.new(parameters.device)
        self._before.copy_(parameters)
        self._compute = compute
        self._at_home = at_home
        self._has_moved = False

    def __call__(self) -> torch.Tensor:
        """Return the loss, a float64 scalar; the parameters have their gradients."""
        with self._at_home():
            self._has_moved = self._has_moved or any(
                not torch.equal(now, before)
                for now, before in zip(self._parameters.vectors, self._before.vectors, strict=True)
            )
            # What is known, too, is put there anew: the optimizer may have scaled or dropped it.
            loss = self._compute() if self._has_moved else self._known()
        return torch.tensor(loss, dtype=torch.float64)


def takes_closure(optimizer: Optimizer) -> bool:
    """Whether ``step()`` may be given one: torch's own would all compute the gradient twice."""
    if type(optimizer).__module__.partition(".")[0] == "torch":
        return needs_closure(optimizer)
    parameters = inspect.signature(type(optimizer).step).parameters
    passes_on = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters.values())
    return "closure" in parameters or (passes_on and needs_closure(optimizer))


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether it, or one within it, cannot step without, as far as that can be seen."""
    return any(map(_needs_closure, optimizers(optimizer)))


def _needs_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return True
    return hasattr(optimizer, "first_step")  # as sharpness-aware ones have it
