"""An operator of a device, computed on the host: arguments are copied there, results back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from quorate.replica.nested import mapped, mapped_leaves, tensors
from quorate.replica.placement.schema import arguments

CPU = torch.device("cpu")


def on_host(
    operator: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device,
    *,
    run: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    fetch: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor.to(CPU),
    non_blocking: bool = False,
) -> Any:
    """Return the operator's result on the device; written arguments are updated in place.

    Args:
        operator: the operator; its schema tells the written arguments.
        run: calls the operator with arguments on the host.
        fetch: returns a tensor on the host for a tensor on a device.
        non_blocking: whether copies to the device may be in progress on return. Torch first copies
            memory that is not page-locked, and frees page-locked memory only after the transfer.
    """
    # By id: a tensor passed twice is one tensor on the host too.
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device):
            return CPU
        if not isinstance(value, torch.Tensor) or value.device == CPU:
            return value
        if id(value) not in copies:
            copies[id(value)] = value, fetch(value)
        return copies[id(value)][1]

    returned = run(*mapped_leaves((args, dict(kwargs)), moved))
    for value, written, _ in arguments(operator, args, kwargs):
        for original in tensors(value) if written else ():
            if id(original) in copies:
                copy = copies[id(original)][1]
                if original.shape != copy.shape:  # an `out` argument
                    original.resize_(copy.shape)
                original.copy_(copy, non_blocking=non_blocking)
    originals = {id(copy): original for original, copy in copies.values()}

    def placed(value: torch.Tensor) -> torch.Tensor:
        if id(value) in originals:
            return originals[id(value)]
        return value.to(device, non_blocking=non_blocking)

    return mapped(returned, placed)
