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
    """Return what an operator returns, on the device; what it writes is written where it lies.

    Args:
        operator: its schema says which arguments are written.
        run: calls the operator with arguments on the host.
        fetch: returns a tensor on the host for one of a device.
        non_blocking: whether results may be on their way to the device on return. Torch copies
            what is not page-locked first, and does not free what is before it has arrived.
    """
    # By id: a tensor that is given twice is one there too.
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
                if original.shape != copy.shape:  # an `out`
                    original.resize_(copy.shape)
                original.copy_(copy, non_blocking=non_blocking)
    originals = {id(copy): original for original, copy in copies.values()}

    def placed(value: torch.Tensor) -> torch.Tensor:
        if id(value) in originals:
            return originals[id(value)]
        return value.to(device, non_blocking=non_blocking)

    return mapped(returned, placed)
