"""The part of a device: a copy of the model of which it has what its stages use.

See ``replica/pipeline/on_devices/lying.py`` for where the copy lies, and why each thread has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import fx

from quorate.engines.stages.shard_input import ShardRows
from quorate.engines.stages.staged_replica import StagedReplica
from quorate.machine.devices import Group, has_streams
from quorate.replica.device_generators import AloneOn
from quorate.replica.flat import Flat
from quorate.replica.pipeline import checks
from quorate.replica.pipeline.buffers import Restored
from quorate.replica.pipeline.on_devices.device_stream import DeviceStream
from quorate.replica.pipeline.on_devices.lying import OnItsDevice
from quorate.replica.pipeline.stage_graph import StageGraph
from quorate.replica.streams import Stream
from quorate.replica.transfer import move


class DeviceReplica(StagedReplica):
    """What one thread computes with. It owns nothing: parameters are those of the whole model.

    Args:
        model: of the parent, on the host.
        parameters: of that.
        device: where it computes.
        graphs: all stages, of the parent's model.
        lies: where its tensors lie.
        options: as for ``Replica``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Flat,
        device: torch.device,
        graphs: Sequence[StageGraph],
        lies: OnItsDevice,
        **options: Any,
    ) -> None:
        super().__init__(
            model, parameters, Group([device]), spread=lies, set_buffers=_none_set, **options
        )
        self.graphs = tuple(
            replace(graph, module=_over(self.model, model, graph)) for graph in graphs
        )

    def refresh(self, parameters: Flat) -> None:
        """Take the values of parameters that it has a copy of."""
        self._flat.take(parameters)

    @contextmanager
    def _on_stage(self) -> Iterator[Stream | DeviceStream]:
        with ExitStack() as stack:
            stream = stack.enter_context(Stream())
            # Its backward passes are this thread's too, with its stream of random numbers, and not
            # those of torch's one thread for the device.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(self._computing.draws(stream, self.group))
            if not has_streams(self.device):
                yield stream
                return
            # A queue of its own, as two stages may be on one GPU, which is the current one then.
            stack.enter_context(torch.Stream(self.device))
            yield DeviceStream(stream, self.device)

    def _turn_on_device(self) -> AbstractContextManager[Any]:
        # The generator is the device's: two stages on one GPU queue their kernels in turn.
        return AloneOn(self.group)

    def _restore(self, buffers: Mapping[str, torch.Tensor]) -> None:
        own = dict(self.model.named_buffers())
        here = {name: b for name, b in buffers.items() if own[name].device.type != "meta"}
        self._set_pulled = Restored(self.model, move(here, self.device))

    def _begin_in_stage(self, stream: Any, seed: int) -> None:
        """As ``Replica`` begins a shard; what it did to buffers the parent finds out."""
        self._modes.set(True)
        for parameter in self._trainable.values():
            parameter.grad = None
        self._set_pulled(self._buffers)
        stream.reseed(seed)

    def _read_in_stage(self, batch: ShardRows, rows: int) -> Any:
        return super()._read_in_stage(batch._replace(data=move(batch.data, self.device)), rows)


def _none_set(_buffers: object) -> None:
    """Leave buffers as they are: a run brings their values."""


def _over(model: torch.nn.Module, original: torch.nn.Module, graph: StageGraph) -> fx.GraphModule:
    """Return what a stage computes, with the tensors and modules of a copy of the model."""
    paths = {id(module): path for path, module in original.named_modules()}
    copied = fx.Graph()
    output = copied.graph_copy(graph.module.graph, {})
    copied.output(output)
    for node in copied.nodes:
        held = getattr(node.target, "held", None)  # a function's argument: of a checkpoint, say
        if held is not None and (moved := _moved(held, model, paths)) is not held:
            node.target = checks.held(moved)
    return fx.GraphModule(model, copied, type(graph.module).__name__)


def _moved(held: Any, model: torch.nn.Module, paths: Mapping[int, str]) -> Any:
    """Return a module of the copy, or a function that uses the copy's modules and tensors.

    Args:
        held: what uses those of the original.
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
    """Return a closure's cell with what ``moved`` makes of its value."""
    try:
        value = cell.cell_contents
    except ValueError:  # it has no value yet
        return cell
    other = moved(value)
    return cell if other is value else CellType(other)
