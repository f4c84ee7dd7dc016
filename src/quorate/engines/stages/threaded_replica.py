"""A pipelined replica whose stages are threads: on GPUs, where kernels run beside each other.

The model of the replica itself stays on the host, with the coordinator's parameters, and is called
there once, to be cut. From then on there are a model in one piece (``StagelessReplica``), with each
tensor on the device of its stage, and for each device a thread with a copy of the model
(``DeviceReplica``): the copy has the tensors of its stages and reads the same parameters.

Gradients are summed on the host, as those of a replica in processes are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from quorate.engines.stages.pipelined_replica import GradientPool, PipelinedReplica
from quorate.engines.stages.stage_devices import StageDevices, StageThreads
from quorate.engines.stages.stage_runner import ShardInput, StageDevice, StagedReplica
from quorate.errors import SettingError
from quorate.machine.devices import Group, has_streams
from quorate.replica.buffers import Buffers
from quorate.replica.compute_thread import CPU
from quorate.replica.flat import Flat
from quorate.replica.loss import Loss
from quorate.replica.pipeline.on_devices.by_loss import UsedByLoss
from quorate.replica.pipeline.on_devices.device_stream import DeviceStream
from quorate.replica.pipeline.on_devices.lying import OnItsDevice, over, owners, used
from quorate.replica.pipeline.on_devices.whole import StagelessReplica
from quorate.replica.pipeline.split import Split
from quorate.replica.pipeline.stage_graph import StageGraph
from quorate.replica.shard_sum import ShardSum
from quorate.replica.spread import DeviceSpread
from quorate.replica.streams import Stream


class ThreadedReplica(PipelinedReplica):
    """A replica whose stages are threads.

    Args:
        model: as for ``Replica``.
        parameters: likewise; on the host.
        group: a device for each thread.
        split: where the model is cut.
        options: as for ``Replica``.

    Raises:
        SettingError: a replica on these devices cannot have such a schedule yet.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Flat,
        group: Group,
        *,
        split: Split,
        **options: Any,
    ) -> None:
        self._masters = parameters  # not rounded to a lower precision
        self._whole: StagelessReplica | None = None
        self._parts: list[DeviceReplica] = []
        self._made_of = {
            name: o for name, o in options.items() if name not in ("own", "set_buffers")
        }
        super().__init__(model, parameters, Group([CPU] * len(group)), split=split, **options)
        self._on = self._accelerators = group
        if split.schedule == "interleaved" and len(set(group)) > 1:
            expected = f"1f1b, gpipe or zero-bubble on {group}"
            raise SettingError("pipeline", split.schedule, expected, "take one of these")

    def changed(self) -> None:
        """Note that user code has changed the model: the next run cuts the model anew."""
        super().changed()
        self._whole, self._parts = None, []

    def close(self) -> None:
        """End the threads; the next run starts new ones."""
        threads, self._stage_devices = self._stage_devices, None
        if threads is not None and not threads.close():
            # A thread that does not end may still write: nobody has that memory from now on.
            self._pool, self._graphs_of_stages, self._whole, self._parts = None, (), None, []

    def pull(
        self,
        parameters: Flat,
        version: object,
        set_buffers: Callable[[Buffers], None] | None = None,
    ) -> None:
        """Compute from these parameters from now on; see ``Replica.pull``."""
        super().pull(parameters, version, set_buffers)
        self._masters = parameters
        if self._whole is not None:
            self._whole.pull(parameters, version)
            for part in self._parts:
                part.refresh(parameters)

    # --- in one piece -----------------------------------------------------------------------------

    def gradient(self, *args: Any, **how: Any) -> ShardSum:
        """Compute forward and backward over a shard, in one piece; see ``Replica.gradient``."""
        whole = self._placed()
        return super().gradient(*args, **how) if whole is None else whole.gradient(*args, **how)

    def evaluation(self, *args: Any, **how: Any) -> ShardSum:
        """Compute forward over a shard, in one piece; see ``Replica.evaluation``."""
        whole = self._placed()
        return super().evaluation(*args, **how) if whole is None else whole.evaluation(*args, **how)

    @contextmanager
    def watched(self, watch: Callable[[Loss], Loss], *, eager: bool = True) -> Iterator[None]:
        """Within the block the loss function is watched; see ``Replica.watched``."""
        whole = self._whole
        watched = super().watched if whole is None else whole.watched
        with watched(watch, eager=eager):
            yield

    def _placed(self) -> StagelessReplica | None:
        """Return the model on its devices, with position and ``Shared``; None before the cut."""
        if (whole := self._whole) is not None:
            whole.loss_call.at = self.loss_call.at
            if (values := self.loss_call.shared.values) is not None:
                whole.loss_call.shared.take(values)
        return whole

    # --- the cut ----------------------------------------------------------------------------------

    def _compute_from_a_copy(self) -> None:
        """Do nothing: devices have copies, and threads see all memory."""
        self._read_by_stages = self._flat

    def _parameters_text(self) -> str:
        """Return the same each time: nobody writes parameters on devices."""
        return ""

    def _cut(self, given: ShardInput, stream: Stream) -> tuple[StageGraph, ...]:
        uses = UsedByLoss(self.model)
        with self.watched(uses.within):
            graphs = super()._cut(given, stream)
        numbers, own = owners(graphs, self._devices), self._buffers

        def set_buffers(buffers: Buffers) -> None:
            self._set_pulled(own)
            buffers.copy_(own)

        whole = StagelessReplica(
            self.model,
            self._masters,
            self._on,
            spread=DeviceSpread.of(numbers),
            set_buffers=set_buffers,
            **self._made_of,
        )
        needed = used(self.model, graphs, self._devices, frozenset(uses.found))
        self._parts = [
            DeviceReplica(
                self.model,
                self._masters,
                device,
                graphs,
                OnItsDevice(device, names, whole.lies),
                **self._made_of,
            )
            for device, names in zip(self._on, needed, strict=True)
        ]
        self._whole = whole
        return graphs

    # --- threads ----------------------------------------------------------------------------------

    def _start(self, pool: GradientPool) -> StageDevices:
        """Start the threads."""
        self._values_of_stages = None
        plan = self._routes(self._graphs_of_stages)

        def serve(device: StageDevice) -> None:
            part = self._parts[device.number]
            part.serve(part.graphs, plan, pool.vectors, device)

        return StageThreads(self._on, serve)

    def _computed(self, *args: Any) -> list[ShardSum]:
        self._modes.set(True)  # stages check the modes of this model
        for device in self._on:
            if device.type != "cpu":  # threads have queues of their own: parameters must be there
                torch.accelerator.synchronize(device)
        return super()._computed(*args)


# --- the part of the model on each device ---------------------------------------------------------


class DeviceReplica(StagedReplica):
    """The copy of the model for a thread. The copy reads the parameters of the whole model.

    See ``replica/pipeline/on_devices/lying.py`` for the place of each tensor, and the reason why
    each thread has a copy.

    Args:
        model: of the parent, on the host.
        parameters: of the parent.
        device: of the thread.
        graphs: all stages, of the parent's model.
        lies: the place of each tensor.
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
            replace(graph, module=over(self.model, model, graph)) for graph in graphs
        )

    def refresh(self, parameters: Flat) -> None:
        """Take the values of copied parameters."""
        self._flat.take(parameters)

    @contextmanager
    def _on_stage(self) -> Iterator[Stream | DeviceStream]:
        with ExitStack() as stack:
            stream = stack.enter_context(Stream())
            # Backward passes run in this thread too, with its stream of random numbers, and not in
            # torch's own thread for the device.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(self._computing.draws(stream, self.group))
            if not has_streams(self.device):
                yield stream
                return
            # A queue of its own, as two stages may be on one GPU. The GPU is the current one then.
            stack.enter_context(torch.Stream(self.device))
            yield DeviceStream(stream, self.device)

    def _begin_in_stage(self, stream: Any, seed: int) -> None:
        """Begin a shard as ``Replica`` does; the parent looks for changes of buffers."""
        self._modes.set(True)
        for parameter in self._trainable.values():
            parameter.grad = None
        self._set_pulled(self._buffers)
        stream.reseed(seed)


def _none_set(_buffers: object) -> None:
    """Leave buffers alone: a run brings their values."""
