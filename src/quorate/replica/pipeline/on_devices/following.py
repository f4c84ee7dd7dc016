"""Operators that follow their values: a forward pass in one piece, of a model on several devices.

The parts of a cut model lie on the devices of their stages. The model's own forward pass does not
know this. Inside ``FollowDevices`` an operator runs on the last device of its arguments, in stage
order, and arguments on an earlier device are moved, with a gradient back to that device. Values go
from stage to stage, so this is the device of the stage to run the operator.

A shard has a single random stream on all devices, but each GPU has a generator. When an operator or
user code uses or sets one of them, all others are set to the same state: so a checkpoint, which
stores the generator states of its inputs' devices, stores the state of the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from quorate.errors import CutError
from quorate.machine.devices import has_streams
from quorate.replica.nested import mapped, tensors


class FollowDevices(TorchFunctionMode):
    """A context in which operators of the calling thread run on the device of their values.

    Args:
        devices: devices in the order of stages. Tensors on further devices are not moved, for
            example tensors that torch wants on the host.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__()
        self._rank = {device: number for number, device in enumerate(devices)}
        self._drawing = [device for device in devices if has_streams(device)]
        self._position = next(iter(self._states()), None)  # of the random stream

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
            self._keep_one_position()
            if len(found) > 1 and func.__name__ not in _COPY:
                for tensor in _written(func, given, kwargs):
                    if tensor.device != device:
                        raise CutError(
                            f"{func.__name__} writes on {tensor.device} what a later stage, on "
                            f"{device}, would write",
                            "write x = x + y in the place of x += y, or cut elsewhere",
                        )
                # A tensor passed twice stays a single tensor: attention compares query and key by
                # identity.
                moved = {id(tensor): self._moved(tensor, device) for tensor in given}
                args, kwargs = mapped([tuple(args), kwargs], lambda t: moved.get(id(t), t))
        returned = func(*args, **kwargs)
        if found and torch.is_grad_enabled():  # for a checkpoint that begins with the next line
            self._keep_one_position()
        return returned

    def _moved(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.device == device:
            return tensor
        return tensor.to(device, non_blocking=True)  # no stage of this kind is on the host

    def _keep_one_position(self) -> None:
        """Set the generators of all devices to the state of the generator that has changed."""
        for state in self._states():
            if not torch.equal(state, self._position):  # type: ignore[arg-type]
                self._position = state
                for device in self._drawing:
                    torch.get_device_module(device).set_rng_state(state, device)
                return

    def _states(self) -> list[torch.Tensor]:
        """Return the state of each device's generator, uint8, on the host."""
        return [torch.get_device_module(each).get_rng_state(each) for each in self._drawing]


# Functions that copy between the devices of their arguments.
_COPY = ("copy_", "to", "type_as", "__set__", "set_")
_READ = ("__index__", "__int__", "__invert__")  # begin like in-place operators, but only read


def _written(
    func: Callable[..., Any], given: Sequence[torch.Tensor], kwargs: Mapping[str, Any]
) -> Sequence[torch.Tensor]:
    """Return the arguments written by a function, as far as the name tells."""
    name = func.__name__
    if name.startswith("_foreach_") and name.endswith("_"):
        return given
    is_in_place = name.endswith("_") and not name.endswith("__")
    is_operator = name == "__setitem__" or (name[:3] == "__i" and name not in _READ)
    return [*given[: is_in_place or is_operator], *tensors(kwargs.get("out"))]
