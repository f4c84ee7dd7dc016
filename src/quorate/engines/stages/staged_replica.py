"""What a device of a pipelined replica does, until the parent wants no more.

It is the same in a process and in a thread: the replica is the process's copy of it, or one that
the device has for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch

from quorate.engines.stages.links import GoneError, StageLinks
from quorate.engines.stages.shard_input import ShardRows
from quorate.engines.stages.stage_runner import (
    Shared,
    StageRunner,
    device_of,
    next_run,
    tell_failed,
)
from quorate.replica.pipeline.buffers import Restored
from quorate.replica.pipeline.on_devices.device_stream import DeviceStream
from quorate.replica.pipeline.routes import Route
from quorate.replica.pipeline.stage import Computing, Stage
from quorate.replica.pipeline.stage_graph import StageGraph
from quorate.replica.replica import Replica
from quorate.replica.streams import Stream


class StagedReplica(Replica):
    """A replica that can compute stages of its model."""

    def serve(
        self,
        graphs: Sequence[StageGraph],
        plan: Sequence[Route],
        devices: int,
        number: int,
        links: StageLinks,
        shared: Shared,
    ) -> None:
        """Be a device, until the parent wants no more.

        Args:
            graphs: all stages.
            plan: their routes.
            devices: how many there are.
            number: of this one.
            links: to the others and the parent.
            shared: where gradients are written.
        """
        with self._on_stage() as stream, self._computing.products():
            computing = Computing(
                self.model, self._trainable, self._begin_in_stage, self._read_in_stage, stream
            )
            stages = {
                graph.index: Stage(graph, route, computing)
                for graph, route in zip(graphs, plan, strict=True)
                if device_of(graph.index, devices) == number
            }
            device = StageRunner(number, devices, stages, links, shared, self._turn_on_device())
            try:
                while True:
                    row, puts, buffers = next_run(links, self.called.shared)
                    self._restore(buffers)
                    with self.called.shared.reading():
                        device.run(row, puts)
            except GoneError:
                return  # the parent decides
            except BaseException as error:  # the edge of the process, or of the thread
                tell_failed(links, device, error)
                with suppress(GoneError):
                    links.take("end")

    @contextmanager
    def _on_stage(self) -> Iterator[Stream | DeviceStream]:
        """Within the block the calling thread computes stages; yields its random stream."""
        with Stream() as stream:
            yield stream

    def _turn_on_device(self) -> AbstractContextManager[Any]:
        """Return what a stage enters while it computes, and leaves while it waits for others."""
        return nullcontext()

    def _restore(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Have the shards of a run begin with these values of buffers."""
        self._set_pulled = Restored(self.model, buffers)

    def _begin_in_stage(self, stream: Any, seed: int) -> None:
        self._begin(stream, seed, training=True)

    def _read_in_stage(self, batch: ShardRows, rows: int) -> Any:
        self.called.at = batch.at
        with self.alone.modes_put_back():
            return self._read(self.plain_loss, batch.data, rows, training=True)
