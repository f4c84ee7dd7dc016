"""The loss over a whole batch, computed once, in the coordinator's process on its device.

The loss is computed from the representations of shards, in the order of shards, so that the value
does not depend on the workers of the shards; with the run's number of threads, precision and
kernels, as in a worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch

from quorate.coordination.keys import key
from quorate.errors import LossError
from quorate.machine.devices import Group
from quorate.replica.compute_thread import as_compute_thread
from quorate.replica.device_generators import reseed_devices
from quorate.replica.flat import Flat
from quorate.replica.loss import LossResult, read
from quorate.replica.model import ModuleModes, laid_out
from quorate.replica.streams import Stream
from quorate.replica.torch_internals import version
from quorate.replica.transfer import move
from quorate.replica.whole_batch.gather import Gather
from quorate.replica.whole_batch.represented import Representations, Tensors, cut, joined
from quorate.training.replicas import ReplicaFactory


class BatchLossResult(NamedTuple):
    """The loss over a batch, and its gradients."""

    outcome: LossResult
    gradients: dict[int, Tensors]  # by shard, with respect to the shard's representations
    of_parameters: Tensors  # with respect to the model's parameters, where the loss uses them


class LocalBatchLoss:
    """The computation of the loss of a batch.

    Args:
        gather: the loss.
        model: the coordinator's model.
        parameters: the trained parameters, or parameters of their layout to compute with, such as
            averages.
        replicas: how workers compute.
        device: device of the model.
        threads: intra-op threads of a worker.
        seed: seed of the run.
    """

    def __init__(
        self,
        gather: Gather,
        model: torch.nn.Module,
        parameters: Flat,
        replicas: ReplicaFactory,
        *,
        device: torch.device,
        threads: int,
        seed: int,
    ) -> None:
        self._gather = gather
        self._model = model
        self._parameters = parameters
        self._trained = laid_out(model, parameters.layout.sections)
        self._replicas = replicas
        self._device = device
        self._threads = threads
        self._seed = seed

    def __call__(
        self, step: int, shards: Sequence[Representations], rows: int, *, training: bool
    ) -> BatchLossResult:
        """Return the loss of a batch, in training with its gradients.

        Args:
            shards: all shards of the batch, in order.
            rows: number of rows of the batch.

        Raises:
            LossError: the loss is no scalar, writes a buffer, or does not depend on the
                representations.
            Exception: an error of user code.
        """
        here = [shard._replace(tensors=move(shard.tensors, self._device)) for shard in shards]
        whole = joined(here).tensors
        group, word = Group([self._device]), "contrast" if training else "contrast in evaluation"
        computing = self._replicas.computing
        wanted = {n: t.requires_grad_() for n, t in whole.items() if t.is_floating_point()}
        with (
            as_compute_thread(self._threads, self._device),
            Stream() as stream,
            self._model_is(training=training),
            computing.products(),
            computing.draws(stream, group),
            torch.set_grad_enabled(training),
        ):
            seed = key(word, self._seed, step)
            stream.reseed(seed)
            reseed_devices(group, seed)
            try:
                with computing.precision.operations(group):
                    returned = self._gather.contrast(
                        self._model, Representations(shards[0].kind, whole).returned()
                    )
            except Exception as error:
                error.add_note(f"quorate: in contrast, of the whole batch of step {step}")
                raise
            totals = self._replicas.totals.wanted
            outcome = read(returned, rows=rows, training=training, totals=totals)
            if not training:
                return BatchLossResult(outcome, {}, {})
            if outcome.weight == 0 or outcome.multiplier == 0:
                raise LossError(
                    "weight",
                    got=f"0 for the whole batch of step {step}",
                    expected="a positive weight",
                    fix="give at least one row of each batch a weight",
                )
            own = {n: p for n, p in self._trained.items() if p.requires_grad}
            inputs = [*wanted.values(), *own.values()]
            found = torch.autograd.grad(outcome.loss, inputs, allow_unused=True)
        of_rows = _named(wanted, found[: len(wanted)])
        if not of_rows:
            raise LossError(
                "the loss has no gradient with respect to what represent returned",
                fix="compute the loss from the second argument of contrast, without detach() or "
                "no_grad()",
            )
        by_shard = dict(enumerate(cut(of_rows, shards)))
        return BatchLossResult(outcome, by_shard, _named(own, found[len(wanted) :]))

    @staticmethod
    def add_to(gradient: Flat, own: Tensors) -> None:
        """Add gradients by parameters to the gradient of a step."""
        for name, values in own.items():
            gradient.views[name].add_(values.to(gradient.device))

    @contextmanager
    def _model_is(self, *, training: bool) -> Iterator[None]:
        """Set the model's mode and parameters for the computation inside the block.

        Raises:
            LossError: a buffer was written in the block, as by BatchNorm in training.
        """
        flags = [(module, module.training) for module in self._model.modules()]
        data = [(parameter, parameter.data) for parameter in self._trained.values()]
        buffers = dict(self._model.named_buffers())
        before = {name: version(buffer) for name, buffer in buffers.items()}
        with ExitStack() as stack:
            stack.callback(_put_back, flags, data)
            ModuleModes(self._model).set(training)
            for name, parameter in self._trained.items():
                view = self._parameters.views[name]
                if parameter.data_ptr() != view.data_ptr():
                    parameter.data = view
            yield
        now = dict(self._model.named_buffers())
        for name, buffer in now.items():
            if buffers.get(name) is not buffer or version(buffer) != before[name]:
                raise LossError(
                    f"contrast writes buffer {name!r}, but only represent may write buffers",
                    fix="call the module of the buffer (BatchNorm, for example) in represent",
                )


def _named(names: Iterable[str], found: Sequence[torch.Tensor | None]) -> Tensors:
    return {n: g.detach() for n, g in zip(names, found, strict=True) if g is not None}


def _put_back(
    flags: Sequence[tuple[torch.nn.Module, bool]],
    data: Sequence[tuple[torch.nn.Parameter, torch.Tensor]],
) -> None:
    for module, flag in flags:
        module.training = flag
    for parameter, own in data:
        if parameter.data_ptr() != own.data_ptr():
            parameter.data = own
