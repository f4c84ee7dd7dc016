"""The places of a model's tensors when stages are threads: on each device that uses the tensor.

The thread of a device has a model of its own, a copy of the structure. Parameters, gradients and
buffers are on the device if its stages use them; all others are on ``meta``, without memory. So
threads share no object written by a thread: no ``forward`` replaced by another thread, no mode of a
module, no gradient of a tied parameter. And a device needs memory for its own stages only.

Tensors used by several stages (tied parameters, parameters used directly by the loss function) are
copied to each of the devices. The copies are refreshed when parameters are pulled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import fx

from quorate.machine.devices import Group
from quorate.replica.flat import Flat
from quorate.replica.pipeline import checks
from quorate.replica.pipeline.stage_graph import StageGraph
from quorate.replica.spread import DeviceSpread, SplitFlat
from quorate.replica.torch_internals import replace_tensors

META = torch.device("meta")


def owners(graphs: Sequence[StageGraph], devices: int) -> dict[str, int]:
    """Return the device that owns each tensor, by name; stages are dealt to devices in turn."""
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
    """Return the names of the tensors needed by each device.

    Args:
        model: the model of the graphs.
        graphs: the stages.
        devices: number of devices.
        by_loss: tensors used directly by the loss function, in every stage.
    """
    names = {id(tensor): name for name, tensor in _named(model).items()}
    # Their gradients pass from the last stage that uses them to the first, through all between.
    common = {*by_loss, *(name for graph in graphs for name in graph.shared)}
    found = [set(common) for _ in range(devices)]
    for graph in graphs:
        tensors = (*graph.module.parameters(), *graph.module.buffers())
        own = {names[id(tensor)] for tensor in tensors if id(tensor) in names}
        found[graph.index % devices] |= {*own, *graph.parameters, *graph.buffers}
    return found


class OnItsDevice(DeviceSpread):
    """The place of a copy of a model for a single device: on the device, or on ``meta``.

    Args:
        device: the device.
        names: names of the tensors needed by the device.
        whole: the parameters of the model on all devices; those on this device are shared.
    """

    def __init__(self, device: torch.device, names: set[str], whole: SplitFlat) -> None:
        self._device, self._names, self._whole = device, names, whole

    def put(self, model: torch.nn.Module, group: Group) -> None:  # noqa: ARG002
        """Move a copy of the model to the device."""
        kept = {id(tensor) for name, tensor in _named(model).items() if name in self._names}
        device = self._device
        replace_tensors(model, lambda t: t.to(device if id(t) in kept else META))

    def working(self, tensors: Mapping[str, torch.Tensor], group: Group) -> SplitFlat:  # noqa: ARG002
        """Return the storage for the parameters of the copy."""
        views, copies = dict[str, torch.Tensor](), list[str]()
        for name, view in self._whole.views.items():
            if name not in self._names:
                views[name] = torch.empty_like(tensors[name], device=META, requires_grad=False)
            elif view.device == self._device:
                views[name] = view
            else:
                views[name] = torch.empty_like(view, device=self._device)
                copies.append(name)
        return _OnOneDevice(views, self._whole, copies)


class _OnOneDevice(SplitFlat):
    """Parameters on one device: shared with the whole model where possible, else copies."""

    def __init__(
        self, views: dict[str, torch.Tensor], whole: SplitFlat, copies: Sequence[str]
    ) -> None:
        self.views = views
        self._whole, self._copies = whole, copies

    def take(self, other: Flat) -> None:  # noqa: ARG002
        """Refresh the copies of parameters from their devices in the whole model."""
        for name in self._copies:
            self.views[name].copy_(self._whole.views[name])


def _named(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def over(model: torch.nn.Module, original: torch.nn.Module, graph: StageGraph) -> fx.GraphModule:
    """Return the graph of a stage, with the tensors and modules of a copy of the model."""
    paths = {id(module): path for path, module in original.named_modules()}
    copied = fx.Graph()
    output = copied.graph_copy(graph.module.graph, {})
    copied.output(output)
    for node in copied.nodes:
        held = getattr(node.target, "held", None)  # an argument of a function: a checkpoint, say
        if held is not None and (moved := _moved(held, model, paths)) is not held:
            node.target = checks.held(moved)
    return fx.GraphModule(model, copied, type(graph.module).__name__)


def _moved(held: Any, model: torch.nn.Module, paths: Mapping[int, str]) -> Any:
    """Return a module of the copy, or a function that uses the copy's modules and tensors.

    Args:
        held: a module of the original, or a user of its modules and tensors.
        model: the copy.
        paths: names of the original's modules, by id.
    """

    def moved(part: Any) -> Any:
        return _moved(part, model, paths)

    if id(held) in paths:
        return model.get_submodule(paths[id(held)])
    if isinstance(held, MethodType) and id(held.__self__) in paths:
        return MethodType(held.__func__, moved(held.__self__))
    if isinstance(held, partial):
        return partial(
            moved(held.func),
            *map(moved, held.args),
            **{n: moved(v) for n, v in held.keywords.items()},
        )
    if type(held) in (list, tuple):
        parts = [*map(moved, held)]
        is_same = all(one is other for one, other in zip(held, parts, strict=True))
        return held if is_same else type(held)(parts)
    if isinstance(held, FunctionType) and held.__closure__:
        cells = tuple(
            _cell(cell, lambda v: v if v is held else moved(v)) for cell in held.__closure__
        )
        if any(one is not other for one, other in zip(cells, held.__closure__, strict=True)):
            code, defaults = held.__code__, held.__defaults__
            copied = FunctionType(code, held.__globals__, held.__name__, defaults, cells)
            copied.__kwdefaults__ = held.__kwdefaults__
            return copied
    return held


def _cell(cell: CellType, moved: Callable[[Any], Any]) -> CellType:
    """Return a closure's cell with the value replaced by ``moved``."""
    try:
        value = cell.cell_contents
    except ValueError:  # it has no value yet
        return cell
    other = moved(value)
    return cell if other is value else CellType(other)
