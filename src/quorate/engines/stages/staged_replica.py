"""A replica that computes stages: the main function of a device, until the parent closes the links.

The function is the same in a process and in a thread. In a process the replica is the process's
copy; in a thread the device has a replica of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from quorate.engines import remote_error
from quorate.engines.remote_error import exited
from quorate.engines.stages.links import serve_parent
from quorate.engines.stages.shard_input import MicroBatch
from quorate.engines.stages.stage_runner import StageDevice, StageRunner, device_of
from quorate.replica.flat import Flat
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
        gradients: Sequence[Flat],
        device: StageDevice,
    ) -> None:
        """Be a device, until the parent closes the links.

        Args:
            graphs: all stages.
            plan: the route of each stage.
            gradients: shared memory for sums of shards, by place.
            device: to be.
        """
        with self._on_stage() as stream, self._computing.products():
            computing = Computing(
                self.model, self._trainable, self._begin_in_stage, self._read_in_stage, stream
            )
            stages = {
                graph.index: Stage(graph, route, computing)
                for graph, route in zip(graphs, plan, strict=True)
                if device_of(graph.index, device.devices) == device.number
            }
            runner = StageRunner(device, stages, gradients, self._turn_on_device())

            def compute(run: Any) -> None:
                row, puts, buffers, values = run
                if values is not None:
                    self.called.shared.take(values)
                self._restore(buffers)
                with self.called.shared.reading():
                    runner.run(row, puts)

            def describe(error: BaseException) -> Any:
                stage, shard = runner.at
                if isinstance(error, SystemExit):  # raised by user code: jobs' signals are ignored
                    error = exited(error, f"stage {stage}, shard {shard} of a run")
                return stage, remote_error.to_json(error)

            serve_parent(device.links, "run", compute, describe)

    @contextmanager
    def _on_stage(self) -> Iterator[Stream | DeviceStream]:
        """Within the block the calling thread computes stages; yields its random stream."""
        with Stream() as stream:
            yield stream

    def _turn_on_device(self) -> AbstractContextManager[Any]:
        """Return a context that a stage enters to compute, and leaves to wait for a value."""
        return nullcontext()

    def _restore(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Have the shards of a run begin with these values of buffers."""
        self._set_pulled = Restored(self.model, buffers)

    def _begin_in_stage(self, stream: Any, seed: int) -> None:
        self._begin(stream, seed, training=True)

    def _read_in_stage(self, batch: MicroBatch, rows: int) -> Any:
        self.called.at = batch.at
        with self.alone.modes_put_back():
            return self._read(self.plain_loss, batch.data, rows, training=True)
