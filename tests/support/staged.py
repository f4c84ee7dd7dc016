"""The stages of a model one after the other in one process: what any runtime of them must give.

Each stage has what it takes as leaves of its own; its backward pass begins with the gradients that
later stages have of what it gives, and of what it shares with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from quorate.replica import nested
from quorate.replica.pipeline.stage_graph import StageGraph, arguments

Loss = Callable[[Any], torch.Tensor]  # of what forward returns


def step(model: nn.Module, args: Sequence[Any], loss: Loss) -> list[torch.Tensor]:
    """Forward and backward of the whole model; return the tensors of its output, and the loss."""
    output = model(*args)
    value = loss(output)
    value.backward()
    return [tensor.detach() for tensor in (*nested.tensors(output), value)]


def staged_step(
    model: nn.Module, stages: Sequence[StageGraph], args: Sequence[Any], loss: Loss
) -> list[torch.Tensor]:
    """Return the same of its stages; gradients are in the model's parameters, as after ``step``."""
    given = arguments(model, args)
    values: dict[str, Any] = {}  # what stages gave, with their graphs
    leaves: list[dict[str, Any]] = []  # by stage: what it took
    value = None
    for stage in stages:
        took = {n: nested.mapped(values[n], leaf) for n in stage.takes if n not in stage.inputs}
        leaves.append(took)
        seen = {name: cloned(took[name]) if name in stage.writes else took[name] for name in took}
        values |= stage.run({**given, **seen})
    output = values["output"]
    value = loss(output)

    parameters = dict(model.named_parameters())
    sums: dict[str, torch.Tensor] = {}  # of parameters, so far
    gradients: dict[str, list[torch.Tensor | None]] = {}  # of values, so far
    for stage in reversed(stages):
        roots: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        if stage.is_last:
            roots.append((value, None))
        taken = leaves[stage.index]
        for names, tensors_of in ((stage.gives, values), (stage.takes, taken)):
            for name in names:
                if name in gradients and name in tensors_of:
                    found = zip(nested.tensors(tensors_of[name]), gradients[name], strict=True)
                    roots += [(t, g) for t, g in found if g is not None]
        for name in stage.parameters + stage.shared:
            if name in sums:
                roots.append((parameters[name], sums.pop(name)))
        if roots:
            torch.autograd.backward([t for t, _ in roots], [g for _, g in roots])
        for name, nest in taken.items():
            gradients[name] = [leaf.grad for leaf in nested.tensors(nest)]
        for name, parameter in parameters.items():
            if stage.index > 0 and parameter.grad is not None:
                sums[name], parameter.grad = parameter.grad, None
    for name, total in sums.items():
        parameters[name].grad = total
    return [tensor.detach() for tensor in (*nested.tensors(output), value)]


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of its own, where the graph of a stage begins."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def cloned(nest: Any) -> Any:
    """The same, for a stage that writes it in place."""
    return nested.mapped(nest, torch.clone)
