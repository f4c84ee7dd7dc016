"""Where the tensors of a model lie whose stages are threads: each on the devices that use it.

A device's thread has a model of its own, which is a copy of the structure. Its parameters,
gradients and buffers are on the device, if its stages use them; all others are on ``meta``, and
take no memory. So threads share nothing that one of them writes: no ``forward`` that another has
put there, no mode of a module, no gradient of a tied parameter. And a device has memory for its own
stages alone.

What several stages use (tied parameters, such as the loss function uses by itself) each device has
a copy of. It is refreshed when parameters are pulled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from quorate.machine.devices import Group
from quorate.replica.flat import Flat
from quorate.replica.pipeline.stage_graph import StageGraph
from quorate.replica.spread import Scattered, Spread
from quorate.replica.torch_internals import replace_tensors

META = torch.device("meta")


def owners(graphs: Sequence[StageGraph], devices: int) -> dict[str, int]:
    """Return which device has a tensor of the model, by name; stages are dealt to them in turn."""
    return {
        name: graph.index % devices
        for graph in graphs
        for name in (*graph.parameters, *graph.buffers)
    }


def used(
    model: torch.nn.Module,
    graphs: Sequence[StageGraph],
    devices: int,
    by_loss: frozenset[str],
) -> list[set[str]]:
    """Return the names of the tensors that each device needs.

    Args:
        model: that the graphs are of.
        graphs: its stages.
        devices: how many.
        by_loss: what the loss function uses by itself, which every stage calls.
    """
    names = {id(tensor): name for name, tensor in _named(model).items()}
    # Their gradients go from the last stage that uses them over each one before to the first.
    common = {*by_loss, *(name for graph in graphs for name in graph.shared)}
    found = [set(common) for _ in range(devices)]
    for graph in graphs:
        tensors = (*graph.module.parameters(), *graph.module.buffers())
        own = {names[id(tensor)] for tensor in tensors if id(tensor) in names}
        found[graph.index % devices] |= {*own, *graph.parameters, *graph.buffers}
    return found


class OnItsDevice(Spread):
    """Where one device's copy of a model lies: there, or nowhere.

    Args:
        device: the device.
        names: of the tensors that it needs.
        whole: the parameters of the model on all devices, of which it reads those that are there.
    """

    def __init__(self, device: torch.device, names: set[str], whole: Scattered) -> None:
        self._device, self._names, self._whole = device, names, whole

    def put(self, model: torch.nn.Module, group: Group) -> None:  # noqa: ARG002
        """Put a copy of the model there."""
        kept = {id(tensor) for name, tensor in _named(model).items() if name in self._names}
        device = self._device
        replace_tensors(model, lambda t: t.to(device if id(t) in kept else META))

    def working(self, tensors: Mapping[str, torch.Tensor], group: Group) -> Scattered:  # noqa: ARG002
        """Return what the copy's parameters are views of."""
        views, copies = dict[str, torch.Tensor](), list[str]()
        for name, view in self._whole.views.items():
            if name not in self._names:
                views[name] = torch.empty_like(tensors[name], device=META, requires_grad=False)
            elif view.device == self._device:
                views[name] = view
            else:
                views[name] = torch.empty_like(view, device=self._device)
                copies.append(name)
        return _Seen(views, self._whole, copies)


class _Seen(Scattered):
    """Parameters of one device: those of the whole model that are there, and copies of others."""

    def __init__(
        self, views: dict[str, torch.Tensor], whole: Scattered, copies: Sequence[str]
    ) -> None:
        self.views = views
        self._whole, self._copies = whole, copies

    def take(self, other: Flat) -> None:  # noqa: ARG002
        """Copy what is not where the whole model has it, from there."""
        for name in self._copies:
            self.views[name].copy_(self._whole.views[name])


def _named(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
