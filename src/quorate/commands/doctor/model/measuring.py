"""The measurement of a model: around a transport, in the first shard of a loop.

``quorate run --measure-model FILE`` enables the measurement. The model is measured at the place of
its call, in the mode and precision of the training. The program ends after one update, when the
optimizer has its state.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quorate.commands.doctor.model.measured import ModelMeasurements
from quorate.coordination.protocol import Event
from quorate.data.source import Batch
from quorate.engines import Channel, Transport, WrappedChannel, WrappedTransport
from quorate.engines.job import Job, Task, Training
from quorate.errors import CutError
from quorate.machine.devices import has_streams
from quorate.machine.resources import most_memory
from quorate.replica import nested
from quorate.replica.pipeline.balance import ModelPieces, pieces
from quorate.replica.replica import Replica
from quorate.replica.shard_sum import ShardSum
from quorate.replica.streams import Stream
from quorate.training.state import State

if TYPE_CHECKING:
    from quorate.training.observer import Observe


def measuring(file: Path) -> Observe:
    """Return an observer that measures the model of a training loop, whose workers are towers.

    Args:
        file: file for the result.
    """

    def observe(transport: Transport, state: State, _facts: Mapping[str, Any]) -> Transport:
        return MeasuringTransport(transport, state, file)

    return observe


class MeasuringTransport(WrappedTransport):
    """A transport whose first training measures the model."""

    def __init__(self, inner: Transport, state: State, file: Path) -> None:
        super().__init__(inner)
        self._state, self._file = state, file

    def open(self, job: Job) -> Channel:
        """Open a job, with a measurement if the job is a training."""
        if not isinstance(job, Training) or job.interrupts_training:
            return super().open(job)
        how: Any = {"on_snapshots": job.on_snapshots, **job.options()}
        measured = MeasuredTraining(job.source, job.parameters, job.steps, **how)
        return MeasuredChannel(super().open(measured), measured, self._state, self._file)


class MeasuredTraining(Training):
    """A ``Training`` that measures the model at its first call in the first shard."""

    is_compared = False
    in_one_piece = True
    found: ModelPieces | None = None
    why_not = ""
    rows = calls = 0
    device = torch.device("cpu")

    def _work(self, replica: Replica, batch: Batch, stream: Stream, task: Task) -> ShardSum:
        if self.calls:
            return super()._work(replica, batch, stream, task)
        model = replica.model
        self.rows, self.device = len(batch.rows), replica.device

        def called(_: torch.nn.Module, args: Any, kwargs: Any) -> None:
            self.calls += 1
            if self.calls == 1:
                hook.remove()
                try:
                    self.found = pieces(model, args, kwargs)
                except CutError as error:
                    self.why_not = str(error).removeprefix("split: ")
                again.append(model.register_forward_pre_hook(called, with_kwargs=True))

        again: list[Any] = []
        hook = model.register_forward_pre_hook(called, with_kwargs=True)
        try:
            return super()._work(replica, batch, stream, task)
        finally:
            for each in (hook, *again):
                each.remove()


class MeasuredChannel(WrappedChannel):
    """The channel of the training, which writes the result after the first update."""

    def __init__(self, inner: Channel, job: MeasuredTraining, state: State, file: Path) -> None:
        super().__init__(inner)
        self._job, self._state, self._file = job, state, file
        self._is_done = False

    def publish(self) -> None:
        """Publish the parameters after an update."""
        super().publish()
        self._is_done = True

    def receive(self, timeout_s: float | None) -> Event | None:
        """Wait for an event.

        Raises:
            SystemExit: the model is measured.
        """
        self._end()
        return super().receive(timeout_s)

    def close(self) -> None:
        """Close the channel; the only update may have been the last update."""
        super().close()
        self._end()

    def _end(self) -> None:
        if not self._is_done or self._file.exists():
            return
        job, model = self._job, self._state.model
        found = job.found or ModelPieces((), ())
        parameters = [*model.parameters()]
        state = [each.state() for each in self._state.phases.optimizers]
        ModelMeasurements(
            device=str(job.device),
            memory_bytes=_memory(job.device),
            rows=job.rows,
            calls=job.calls,
            parameter_bytes=sum(parameter.nbytes for parameter in parameters),
            trained_bytes=sum(p.nbytes for p in parameters if p.requires_grad),
            optimizer_bytes=sum(tensor.nbytes for tensor in nested.tensors(state)),
            names=[*found.names],
            costs=[*found.costs],
            why_not=job.why_not if job.calls else "the loss function does not call the model",
        ).write(self._file)
        raise SystemExit(0)


def _memory(device: torch.device) -> int | None:
    if has_streams(device):
        return torch.accelerator.get_memory_info(device)[1]
    return most_memory() if device.type == "cpu" else None
