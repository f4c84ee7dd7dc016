"""What is known of torch's own optimizers: which work element by element, and what they keep."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.optim import Optimizer

from quorate.replica.torch_internals import has_step_hooks

# Exact types: a subclass may look at shapes.
ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    (
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    )
)
FUSED: frozenset[type[Optimizer]] = frozenset(
    (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
)
# What torch's optimizers keep once per tensor and not per element. A name is needed to tell: the
# moments of a parameter without dimensions are scalars too.
COUNTERS = frozenset(("step", "eta", "mu", "mu_product"))


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether what an optimizer does to an element does not depend on the tensor it lies in."""
    return (
        type(optimizer) in ELEMENTWISE
        and not any(group.get("differentiable") for group in optimizer.param_groups)
        and not has_step_hooks(optimizer)
    )


def leaves_it_open(group: dict[str, Any]) -> bool:
    """Whether a group's options leave the choice of the kernel to us."""
    chosen = group["fused"] is not None or group["foreach"] is not None or group.get("capturable")
    if group.get("dampening"):  # not for the first gradient: see ``FlatOptimizer``
        return False
    return not chosen and not any(tensor.is_complex() for tensor in group["params"])


def entries_of(
    kind: type[Optimizer], tensor: torch.Tensor, group: dict[str, Any]
) -> frozenset[str]:
    """Return the entries that an optimizer keeps for a tensor of a group, by a step with one."""
    example = torch.nn.Parameter(torch.zeros(1, dtype=tensor.dtype, device=tensor.device))
    example.grad = torch.zeros_like(example)
    options = {name: value for name, value in group.items() if name != "params"}
    optimizer = kind([{**copy.deepcopy(options), "params": [example]}])  # type: ignore[call-arg]
    optimizer.step()
    made = optimizer.state[example].items()
    return frozenset(entry for entry, value in made if isinstance(value, torch.Tensor))
