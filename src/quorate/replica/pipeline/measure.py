"""The costs of stages for one shard: time, and memory for parameters and saved activations.

Each stage is run by itself on the results of the stages before it, forward and backward. A fine
cut, with a stage for each module, measures all coarser cuts: their times and bytes are sums.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quorate.machine.devices import has_streams
from quorate.replica import nested
from quorate.replica.model import unchanged
from quorate.replica.pipeline.stage_graph import StageGraph, arguments

REPEATS = 3  # the least time counts: longer times include delays


@dataclass(frozen=True)
class Cost:
    """The cost of computing one shard in a stage."""

    forward_s: float
    backward_s: float
    parameter_bytes: int  # of owned parameters
    trained_bytes: int  # of owned parameters with a gradient
    kept_bytes: int  # saved by forward for backward, without parameters and inputs
    given_bytes: int  # passed to later stages: their gradients take as much

    @property
    def seconds(self) -> float:
        """Time of forward and backward, in seconds."""
        return self.forward_s + self.backward_s


def measured(
    model: nn.Module,
    stages: Sequence[StageGraph],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    repeats: int = REPEATS,
) -> tuple[Cost, ...]:
    """Return the cost of each stage for the arguments of one shard. The model is restored."""
    with unchanged(model), torch.random.fork_rng(devices=[]), torch.enable_grad():
        runs = [_measured(model, stages, args, kwargs) for _ in range(repeats)]
    first = runs[0]
    return tuple(
        Cost(
            min(run[number].forward_s for run in runs),
            min(run[number].backward_s for run in runs),
            cost.parameter_bytes,
            cost.trained_bytes,
            cost.kept_bytes,
            cost.given_bytes,
        )
        for number, cost in enumerate(first)
    )


def _measured(
    model: nn.Module,
    stages: Sequence[StageGraph],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
) -> list[Cost]:
    given = arguments(model, args, kwargs)
    parameters = dict(model.named_parameters())
    before = {name: parameter.grad for name, parameter in parameters.items()}
    of_model = {_place(tensor) for tensor in (*model.parameters(), *model.buffers())}
    of_model |= {_place(tensor) for tensor in nested.tensors(list(given.values()))}
    values: dict[str, Any] = dict(given)
    costs = []
    try:
        for stage in stages:
            taken = {name: nested.mapped(values[name], _leaf) for name in stage.takes}
            for name in stage.writes:  # a leaf must not be written
                taken[name] = nested.mapped(taken[name], torch.clone)
            known = of_model | {_place(t) for t in nested.tensors(list(taken.values()))}
            kept: dict[int, int] = {}

            def keep(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
                if tensor.layout is torch.strided:
                    kept[_place(tensor)] = tensor.untyped_storage().nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                begun = _now(model)
                gives = stage.run(taken)
                forward_s = _now(model) - begun
            outputs = [t for t in nested.tensors(list(gives.values())) if t.requires_grad]
            gradients = [torch.ones_like(tensor) for tensor in outputs]
            begun = _now(model)
            if outputs:
                torch.autograd.backward(outputs, gradients)
            backward_s = _now(model) - begun
            own = [parameters[name] for name in stage.parameters]
            costs.append(
                Cost(
                    forward_s,
                    backward_s,
                    sum(parameter.nbytes for parameter in own),
                    sum(parameter.nbytes for parameter in own if parameter.requires_grad),
                    sum(size for place, size in kept.items() if place not in known),
                    0
                    if stage.is_last
                    else sum(t.nbytes for t in nested.tensors([*gives.values()])),
                )
            )
            # Whether later stages compute gradients of these values is part of their cost.
            values |= {name: nested.mapped(nest, _leaf) for name, nest in gives.items()}
    finally:
        for name, gradient in before.items():
            parameters[name].grad = gradient
    return costs


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides, as the beginning of a stage's graph."""
    copied = tensor.detach().clone()
    return copied.requires_grad_() if tensor.requires_grad else copied


def _place(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return -1
    return tensor.untyped_storage().data_ptr()


def _now(model: nn.Module) -> float:
    """Return the time after all work has finished."""
    parameter = next(model.parameters(), None)
    if parameter is not None and has_streams(parameter.device):
        torch.accelerator.synchronize(parameter.device)
    return time.perf_counter()
