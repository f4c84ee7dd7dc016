"""Operators that follow their values: a forward pass in one piece, of a model on several devices.

The parts of a model that is cut lie on the devices of their stages. Its own forward pass knows
nothing of that. Within ``Following`` an operator runs on the last of the devices that something it
is given lies on, and what lies on an earlier one is moved there, with a gradient that comes back.
As values go from stage to stage, that is where the stage would run it.

A shard has one random stream, wherever it is computed. GPUs have a generator each: with the
operators its position goes from one to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from quorate.errors import CutError
from quorate.replica.nested import mapped, tensors


class Following(TorchFunctionMode):
    """Within a ``with`` block operators of the calling thread run where their values are.

    Args:
        devices: in the order of stages. Tensors elsewhere are left where they are: what torch
            wants on the host, say.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__()
        self._rank = {device: number for number, device in enumerate(devices)}
        self._at = devices[0]  # where the position of the random stream is

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        given = [tensor for tensor in tensors([args, kwargs]) if tensor.device in self._rank]
        found = {tensor.device for tensor in given}
        if not found and isinstance(kwargs.get("device"), torch.device):
            found = {kwargs["device"]} & self._rank.keys()
        if found:
            device = max(found, key=self._rank.__getitem__)
            self._draw_on(device)
            if len(found) > 1 and func.__name__ not in _COPY:
                for tensor in _written(func, given, kwargs):
                    if tensor.device != device:
                        raise CutError(
                            f"{func.__name__} writes on {tensor.device} what a later stage, on "
                            f"{device}, would write",
                            "write x = x + y in the place of x += y, or cut elsewhere",
                        )
                args, kwargs = mapped([tuple(args), kwargs], lambda t: self._moved(t, device))
        return func(*args, **kwargs)

    def _moved(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        is_elsewhere = tensor.device in self._rank and tensor.device != device
        return tensor.to(device, non_blocking=True) if is_elsewhere else tensor

    def _draw_on(self, device: torch.device) -> None:
        """Have random numbers go on where they were on another device."""
        if device != self._at and device.type == self._at.type == "cuda":
            state = torch.cuda.get_rng_state(self._at)
            torch.cuda.set_rng_state(state, device)
        self._at = device


# What is given tensors of two devices to copy one to the other.
_COPY = ("copy_", "to", "type_as", "__set__", "set_")
_READ = ("__index__", "__int__", "__invert__")  # and do not write, by their names' beginning


def _written(
    func: Callable[..., Any], given: Sequence[torch.Tensor], kwargs: Mapping[str, Any]
) -> Sequence[torch.Tensor]:
    """Return which of the tensors that a function is given it writes, as far as its name says."""
    name = func.__name__
    if name.startswith("_foreach_") and name.endswith("_"):
        return given
    is_in_place = name.endswith("_") and not name.endswith("__")
    is_operator = name == "__setitem__" or (name[:3] == "__i" and name not in _READ)
    return [*given[: is_in_place or is_operator], *tensors(kwargs.get("out"))]
