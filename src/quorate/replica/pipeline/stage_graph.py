"""A stage graph: the part of a model's forward pass for a single device of a pipeline.

Stages pass values to each other by name. Run one after the other, they compute the model's results,
operator by operator and in the model's order. So do their backward passes, under three rules for
the runner:

1. Backward goes from the last stage to the first, and the gradient of a value taken by several
   stages is summed in this order: the sum of the later stages is a *root* of the next stage's
   backward pass, ``torch.autograd.backward([*gives, leaf], [*gradients, sum])``. The engine adds
   roots first, as it adds the gradients of later nodes first in the unsplit model.
2. The same holds for a parameter in ``shared``: the sum so far is a root, and ends at the owner,
   the first stage that uses the parameter. A loss function may use parameters of other stages than
   the last, too; their gradients take the same way.
3. A value taken by a stage is a new leaf (``detach().requires_grad_(v.requires_grad)``) with the
   same strides, because kernels depend on strides; for a value in ``writes`` the stage receives a
   clone of the leaf, because a leaf may not be written in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

OUTPUT = "output"  # the value given by the last stage


@dataclass(frozen=True, kw_only=True)
class StageGraph:
    """The part of a forward pass from one split point to the next.

    Values are tensors, numbers, sizes, and tuples, lists and mappings of them. Names of parameters
    and buffers are those of ``model.named_parameters()`` and ``named_buffers()``.
    """

    index: int  # from 0
    module: fx.GraphModule  # taken values -> a tuple of given values; has the user's own modules
    takes: tuple[str, ...]  # arguments of forward, and values given by earlier stages
    gives: tuple[str, ...]  # values taken by later stages; for the last stage ``OUTPUT``
    inputs: tuple[str, ...]  # the arguments of forward in ``takes``: every stage has them itself
    parameters: tuple[str, ...]  # owned; the last stage owns parameters unused by forward
    shared: tuple[str, ...]  # used by several stages, owned by the first of them
    buffers: tuple[str, ...]  # owned, like parameters
    writes: tuple[str, ...]  # values in ``takes`` that this stage writes in place
    modules: tuple[str, ...]  # called modules, in the order of their first calls
    begins: str = ""  # the named module at the cut; "": the first stage

    @property
    def is_last(self) -> bool:
        """True if the stage gives the result of forward."""
        return self.gives == (OUTPUT,)

    def run(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Compute the given values from the taken values.

        Raises:
            CutError: forward takes another branch with these values than at the cut, or an
                attribute of a module that was read at the cut has changed.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # if the graph raises within no_grad
            given = self.module(*(values[name] for name in self.takes))
        return dict(zip(self.gives, given, strict=True))


def arguments(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the arguments of a call of the model, by the names used in stages.

    Raises:
        TypeError: the call would raise it.
    """
    bound = inspect.signature(model.forward).bind(*args, **(kwargs or {}))
    bound.apply_defaults()
    return dict(bound.arguments)
