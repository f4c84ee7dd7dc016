"""Fused kernels of torch's optimizers: which have one, when to take it, and what it wants."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

FUSED: frozenset[type[Optimizer]] = frozenset(
    (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
)


def fill_momenta(sgd: Optimizer) -> None:
    """Give zeros to fused SGD for momenta that are not there yet, next to others that are.

    It takes all of them or none. From zeros the first one becomes the gradient, as from none.
    """
    for group in sgd.param_groups:
        if not (group["fused"] and group["momentum"]):
            continue
        updated = [tensor for tensor in group["params"] if tensor.grad is not None]
        late = [t for t in updated if sgd.state[t].get("momentum_buffer") is None]
        if len(late) < len(updated):
            for tensor in late:
                sgd.state[tensor]["momentum_buffer"] = torch.zeros_like(tensor)


def leaves_it_open(group: dict[str, Any]) -> bool:
    """Whether a group's options leave the choice of the kernel to us."""
    chosen = group["fused"] is not None or group["foreach"] is not None or group.get("capturable")
    if group.get("dampening"):  # not for the first gradient: see ``fill_momenta``
        return False
    return not chosen and not any(tensor.is_complex() for tensor in group["params"])
