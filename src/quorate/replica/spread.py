"""A replica spread over several devices, with each part of the model on one of them.

The script chooses the devices: it moves parts of the model (``self.head.to("cuda:1")``), and its
forward pass moves the result of a part to the device of the next. ``cuda:0+cuda:1`` names these
devices. For ``cuda:0+cuda:1,cuda:2+cuda:3`` the first replica is as made by the script, and in the
second the parts of cuda:0 are on cuda:2; so forward must use the device of a part
(``x.to(self.head.weight.device)``) and not a name.

The coordinator keeps the parameters (the masters) in host memory, and makes updates there: a spread
model does not fit in the memory of a single device. Each replica computes with a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from quorate.errors import SettingError
from quorate.machine.devices import Group
from quorate.replica.flat import Flat, Layout
from quorate.replica.torch_internals import replace_tensors


class DeviceSpread:
    """The places of a model's tensors, as numbers of a replica's devices.

    Args:
        model: the model as made by the script.
        groups: the devices of each replica.

    Raises:
        SettingError: the replicas have different numbers of devices, or the model is not on those
            of the first replica.
    """

    def __init__(self, model: torch.nn.Module, groups: Sequence[Group]) -> None:
        first = groups[0]
        for group in groups:
            if len(group) != len(first) or len(set(group)) != len(first):
                expected = f"{len(first)} different devices for each replica"
                fix = "spread all replicas alike"
                raise SettingError("devices", ",".join(map(str, groups)), expected, fix)
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        found = dict.fromkeys(tensor.device for tensor in tensors.values())
        if set(found) != set(first):
            names = " and ".join(map(str, found))
            fix = "put each part of the model on its device where the model is made"
            raise SettingError("model", f"parts on {names}", f"parts on {first}", fix)
        self._number = {name: first.index(tensor.device) for name, tensor in tensors.items()}

    @classmethod
    def of(cls, numbers: Mapping[str, int]) -> DeviceSpread:
        """Return the places of a model's tensors from device numbers by name."""
        spread = cls.__new__(cls)
        spread._number = dict(numbers)
        return spread

    def put(self, model: torch.nn.Module, group: Group) -> None:
        """Move the parts of a model, in place, to the devices of a replica."""
        tensors = (*model.named_parameters(), *model.named_buffers())
        devices = {id(tensor): group[self._number[name]] for name, tensor in tensors}
        replace_tensors(model, lambda tensor: tensor.to(devices.get(id(tensor), tensor.device)))

    def working(self, tensors: Mapping[str, torch.Tensor], group: Group) -> SplitFlat:
        """Return zeroed tensors like the given ones, each on its part's device."""
        return SplitFlat(
            [
                Layout((n, t) for n, t in tensors.items() if self._number[n] == number).new(device)
                for number, device in enumerate(group)
            ],
            list(tensors),
        )


class SplitFlat:
    """Flat vectors on several devices, with a view per tensor."""

    def __init__(self, flats: Sequence[Flat], order: Sequence[str]) -> None:
        found = {name: view for flat in flats for name, view in flat.views.items()}
        self.views = {name: found[name] for name in order}

    def take(self, other: Flat) -> None:
        """Copy the values of the same tensors."""
        for name, view in self.views.items():
            view.copy_(other.views[name])


def working_copy(
    parameters: Flat,
    trained: Mapping[str, torch.Tensor],
    lowered: Sequence[tuple[str, torch.Tensor]] | None,
    group: Group,
    spread: DeviceSpread | None,
) -> Flat | SplitFlat:
    """Return the parameters that a replica computes with: the masters themselves, if possible.

    Args:
        parameters: the masters.
        trained: the trained parameters as made by the script.
        lowered: templates of the parameters in the working precision, if different.
        group: the replica's devices.
        spread: the places of tensors, if the replica is spread.
    """
    if lowered is None and spread is None and parameters.device == group[0]:
        return parameters
    working: Flat | SplitFlat
    if spread is not None:
        working = spread.working(dict(lowered or trained), group)
    else:
        layout = parameters.layout
        working = (Layout(lowered, layout.by_rows) if lowered else layout).new(group[0])
    working.take(parameters)
    return working
