"""A stage graph: the part of a model's forward pass that one device of a pipeline computes.

Stages hand each other values by name. Run one after the other they do what the model does,
operator by operator and in its order. So do their backward passes, if whoever runs them keeps to
three rules:

1. Backward goes from the last stage to the first, and a value that several stages take has its
   gradient summed in that order: the sum of the later stages is a *root* of the next one's
   backward pass, ``torch.autograd.backward([*gives, leaf], [*gradients, sum])``. The engine puts
   roots first into a sum, as the unsplit model's engine has them from the nodes that ran later.
2. Likewise of a parameter in ``shared``: the sum so far is a root, and ends at its owner, the
   first stage that uses it. A loss function may use parameters of other stages than the last, too;
   their gradients go the same way.
3. What a stage takes is a leaf of its own (``detach().requires_grad_(v.requires_grad)``) of the
   same strides, as kernels go by them; of a value in ``writes`` the stage gets a clone of that
   leaf, as a leaf may not be written in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

OUTPUT = "output"  # what the last stage gives


@dataclass(frozen=True, kw_only=True)
class StageGraph:
    """The part of a forward pass from one split point to the next.

    Values are tensors, numbers, sizes, and tuples, lists and mappings of them. Names of parameters
    and buffers are those of ``model.named_parameters()`` and ``named_buffers()``.
    """

    index: int  # from 0
    module: fx.GraphModule  # takes, by position -> a tuple of what it gives; the user's own modules
    takes: tuple[str, ...]  # arguments of forward, and values that earlier stages give
    gives: tuple[str, ...]  # what later stages take; of the last stage ``OUTPUT``
    inputs: tuple[str, ...]  # of ``takes``, the arguments of forward: every stage has those itself
    parameters: tuple[str, ...]  # owned; those that forward does not use are the last stage's
    shared: tuple[str, ...]  # used here and in other stages, owned by the first of these
    buffers: tuple[str, ...]  # owned, as parameters are
    writes: tuple[str, ...]  # of ``takes``, what this stage writes in place
    modules: tuple[str, ...]  # that it calls, in the order of their first calls
    begins: str = ""  # the module that was named; "": it is the first stage

    @property
    def is_last(self) -> bool:
        """Whether it gives what forward returns."""
        return self.gives == (OUTPUT,)

    def run(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Compute, from at least what it takes, what it gives.

        Raises:
            CutError: forward decides otherwise with these values than with those that it was cut
                with, or something of a module that was read then has another value now.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # if it raises within no_grad
            given = self.module(*(values[name] for name in self.takes))
        return dict(zip(self.gives, given, strict=True))


def arguments(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the arguments of a call of a model by the names that stages have for them.

    Raises:
        TypeError: as the call would.
    """
    bound = inspect.signature(model.forward).bind(*args, **(kwargs or {}))
    bound.apply_defaults()
    return dict(bound.arguments)
