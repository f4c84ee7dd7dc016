"""Closures: compute the gradient of a step again, at parameters moved by an optimizer.

LBFGS evaluates the gradient at several points of a step, sharpness-aware optimizers at two.
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
    """The closure passed to an optimizer's ``step()``.

    The gradient of the step has been computed before. The first call is usually made at the same
    parameters, by optimizers with an optional closure too, and is answered with the known gradient.

    Args:
        known: restores the gradient computed at the original parameters, and returns the loss.
        parameters: the parameters that the optimizer moves.
        compute: computes gradients at the current parameters, and returns the loss.
        at_home: a context in which ``parameters`` have the optimizer's values, in whatever memory
            the optimizer has put the values.
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
        self._before = parameters.copied()
        self._compute = compute
        self._at_home = at_home
        self._has_moved = False

    def __call__(self) -> torch.Tensor:
        """Return the loss, a float64 scalar, after setting the gradients of the parameters."""
        with self._at_home():
            self._has_moved = self._has_moved or any(
                not torch.equal(now, before)
                for now, before in zip(self._parameters.vectors, self._before.vectors, strict=True)
            )
            # The known gradient is restored too: the optimizer may have scaled or dropped it.
            loss = self._compute() if self._has_moved else self._known()
        return torch.tensor(loss, dtype=torch.float64)


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
