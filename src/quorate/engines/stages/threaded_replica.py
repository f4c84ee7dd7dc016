"""A pipelined replica whose stages are threads: on GPUs, where kernels run beside each other.

The model of the replica itself stays on the host, where the coordinator's parameters are. It is
called there once, to be cut. From then on there are a model in one piece, each tensor of which lies
on the device of its stage (``Whole``), and for each device a thread with a copy of the model that
has the tensors of its stages and reads the same parameters (``DeviceReplica``).

Gradients are summed on the host, as those of a replica in processes are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from quorate.engines.stages.device_replica import DeviceReplica
from quorate.engines.stages.devices import StageDevices, StageThreads
from quorate.engines.stages.pipelined_replica import PipelinedReplica
from quorate.engines.stages.shard_input import ShardInput
from quorate.engines.stages.stage_runner import Shared
from quorate.errors import SettingError
from quorate.machine.devices import Group
from quorate.replica.buffers import Buffers
from quorate.replica.flat import Flat
from quorate.replica.loss import Loss
from quorate.replica.pipeline.on_devices.by_loss import UsedByLoss
from quorate.replica.pipeline.on_devices.lying import OnItsDevice, owners, used
from quorate.replica.pipeline.on_devices.whole import Whole
from quorate.replica.pipeline.split import Split
from quorate.replica.pipeline.stage_graph import StageGraph
from quorate.replica.shard_sum import ShardSum
from quorate.replica.spread import Spread
from quorate.replica.streams import Stream

CPU = torch.device("cpu")


class ThreadedReplica(PipelinedReplica):
    """A replica whose stages are threads.

    Args:
        model: as for ``Replica``.
        parameters: likewise; on the host.
        group: a device for each thread.
        split: where the model is cut.
        options: as for ``Replica``.

    Raises:
        SettingError: of what this replica is asked for there is nothing yet.
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
        self._on = group
        self._masters = parameters  # not as they are rounded to a lower precision
        self._whole: Whole | None = None
        self._parts: list[DeviceReplica] = []
        self._made_of = {
            name: o for name, o in options.items() if name not in ("own", "set_buffers")
        }
        super().__init__(model, parameters, Group([CPU] * len(group)), split=split, **options)
        if split.schedule == "interleaved" and len(set(group)) > 1:
            expected = f"1f1b, gpipe or zero-bubble on {group}"
            raise SettingError("pipeline", split.schedule, expected, "take one of these")

    def changed(self) -> None:
        """Note that the model computes otherwise now: it is cut and copied anew."""
        super().changed()
        self._whole, self._parts = None, []

    def close(self) -> None:
        """End the threads; the next run starts new ones."""
        threads, self._processes = self._processes, None
        if threads is not None and not threads.close():
            # One that does not end may still write: into what nobody has from now on.
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
        """Compute forward and backward over one shard, in one piece; see ``Replica.gradient``."""
        whole = self._placed()
        return super().gradient(*args, **how) if whole is None else whole.gradient(*args, **how)

    def evaluation(self, *args: Any, **how: Any) -> ShardSum:
        """Compute forward over one shard, in one piece; see ``Replica.evaluation``."""
        whole = self._placed()
        return super().evaluation(*args, **how) if whole is None else whole.evaluation(*args, **how)

    @contextmanager
    def watched(self, watch: Callable[[Loss], Loss], *, eager: bool = True) -> Iterator[None]:
        """Within the block the loss function is another; see ``Replica.watched``."""
        whole = self._whole
        watched = super().watched if whole is None else whole.watched
        with watched(watch, eager=eager):
            yield

    def _placed(self) -> Whole | None:
        """Return the model on its devices, told what this one was; None: it is not yet cut."""
        if (whole := self._whole) is not None:
            whole.called.at = self.called.at
            if (values := self.called.shared.values) is not None:
                whole.called.shared.take(values)
        return whole

    # --- the cut ----------------------------------------------------------------------------------

    def _compute_from_a_copy(self) -> None:
        """Do nothing: devices have copies, and threads see all memory."""
        self._read_by_stages = self._flat

    @property
    def _accelerators(self) -> Group:
        return self._on

    def _parameters_text(self) -> str:
        """Return the same each time: nobody writes what is on the devices."""
        return ""

    def _cut(self, given: ShardInput, stream: Stream) -> tuple[StageGraph, ...]:
        uses = UsedByLoss(self.model)
        with self.watched(uses.within):
            graphs = super()._cut(given, stream)
        numbers, own = owners(graphs, self._devices), self._buffers

        def set_buffers(buffers: Buffers) -> None:
            self._set_pulled(own)
            buffers.copy_(own)

        whole = Whole(
            self.model,
            self._masters,
            self._on,
            spread=Spread.of(numbers),
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

    def _start(self) -> StageDevices:
        """Start the threads."""
        graphs, pool = self._graphs_of_stages, self._pool
        assert pool is not None
        plan = self._routes(graphs)

        def serve(number: int, links: Any, shared: Shared) -> None:
            part = self._parts[number]
            part.serve(part.graphs, plan, self._devices, number, links, shared)

        return StageThreads(self._on, Shared(pool.vectors, self._devices), serve)

    def _computed(self, *args: Any) -> list[ShardSum]:
        self._modes.set(True)  # which stages check, of this model
        for device in self._on:
            if device.type != "cpu":  # threads have queues of their own: parameters must be there
                torch.accelerator.synchronize(device)
        return super()._computed(*args)
