"""The loss over a whole batch: from representations of all shards of a step to one gradient.

    main job     each shard: forward                                   Representing
    here         all rows: the loss, its gradient by representations   LocalBatchLoss
    inner job    each shard: forward again, backward of its part       BackThrough
    here         ordered sum, plus the loss's own gradient of parameters; then the usual update

The inner job is dealt like any step: the shards of a worker that is slow, raises or dies are
computed by other workers, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
from msgspec import structs

from quorate.coordination.keys import key
from quorate.coordination.plan import Plan
from quorate.data.source import Batch, Source
from quorate.engines.job import Evaluation, PassOverKeptRows, Task, Training, shard_seed
from quorate.errors import LossError, SettingError
from quorate.machine.devices import Group
from quorate.replica.compute_thread import as_compute_thread
from quorate.replica.device_generators import reseed_devices
from quorate.replica.flat import Flat
from quorate.replica.loss import LossResult, read
from quorate.replica.model import ModuleModes, laid_out
from quorate.replica.replica import Replica
from quorate.replica.shard_sum import ShardSum
from quorate.replica.streams import Stream
from quorate.replica.torch_internals import version
from quorate.replica.transfer import move
from quorate.replica.whole_batch.gather import Gather, SecondInput
from quorate.replica.whole_batch.represented import Representations, Tensors, cut, join_shards
from quorate.training.optimizing.closure import needs_closure
from quorate.training.state import State
from quorate.training.worker_group import WorkerGroup

# --- jobs of workers ------------------------------------------------------------------------------


class Representing(Training):
    """A job for the representations of shards; a batch of a single shard yields its gradient."""

    def has_gradients(self, step: int) -> bool:
        """Return whether the step has one shard."""
        return self.plan.shards_of(step) == 1

    def _work(self, replica: Replica, batch: Batch, stream: Stream, task: Task) -> ShardSum:
        if self.has_gradients(task.step):
            return super()._work(replica, batch, stream, task)
        task.at("forward")
        gather, rows = _gather(replica), len(batch.rows)
        seed = shard_seed(self.plan, task.step, task.shard)
        # Without ``reload``: user code receives copies, and the rows stay unchanged.
        result = gather.represented(replica, batch.data, rows, stream, seed, training=True)
        replica.transfers.keep((task.step, task.shard), batch)
        return result


@dataclass(eq=False, kw_only=True)
class BackThrough(PassOverKeptRows):
    """A job for a step's gradients, from gradients with respect to the representations of shards.

    Args:
        gradients: gradients by shard, in the coordinator's process alone. A worker of another
            process receives them with the shard.
    """

    gradients: Mapping[int, Tensors] = field(default_factory=dict)

    def beside(self, step: int, shard: int) -> Tensors | None:  # noqa: ARG002
        """Return the gradient with respect to the representations of a shard."""
        return self.gradients.get(shard)

    def _work(self, replica: Replica, batch: Batch, stream: Stream, task: Task) -> ShardSum:
        gradients = task.beside or self.beside(task.step, task.shard)
        assert gradients is not None
        return replica.gradient(
            SecondInput(batch.data, gradients),
            len(batch.rows),
            stream,
            shard_seed(self.plan, task.step, task.shard),
            into=task.into,
            at=task.at,
            reload=lambda: SecondInput(self._reloaded(task), gradients),
        )


class RepresentingInEvaluation(Evaluation):
    """A job for the representations of shards in evaluation mode."""

    def _work(self, replica: Replica, batch: Batch, stream: Stream, task: Task) -> ShardSum:
        task.at("forward")
        seed = key("evaluation", self.plan.seed, task.step, task.shard)
        return _gather(replica).represented(
            replica,
            batch.data,
            len(batch.rows),
            stream,
            seed,
            training=False,
            reload=partial(self._reloaded, task),
        )


def _gather(replica: Replica) -> Gather:
    loss = replica.loss_call.loss
    assert isinstance(loss, Gather)
    return loss


# --- the loss, in the coordinator's process -------------------------------------------------------


class BatchLossResult(NamedTuple):
    """The loss over a batch, and its gradients."""

    outcome: LossResult
    gradients: dict[int, Tensors]  # by shard, with respect to the shard's representations
    of_parameters: Tensors  # with respect to the model's parameters, where the loss uses them


class BatchLoss(Protocol):
    """Computes the loss over a batch in training: ``LocalBatchLoss``, or ``RankBatchLoss``."""

    def __call__(self, step: int, shards: Sequence[Representations]) -> BatchLossResult:
        """Return the loss, with gradients for the shards that this process computes again."""

    def add_to(self, gradient: Flat, own: Tensors) -> None:
        """Add gradients by parameters to the gradient of a step."""


class LocalBatchLoss:
    """The computation of the loss of a batch, once, in the coordinator's process on its device.

    The loss is computed from the representations of shards, in the order of shards, so that the
    value does not depend on the workers of the shards; with the run's number of threads, precision
    and kernels, as in a worker.

    Args:
        gather: the loss.
        workers: how workers compute.
        state: the coordinator's state.
        source: the rows of each shard.
        parameters: the trained parameters, or parameters of their layout to compute with, such as
            averages.
    """

    def __init__(
        self, gather: Gather, workers: WorkerGroup, state: State, source: Source, parameters: Flat
    ) -> None:
        self._gather, self._workers, self._plan = gather, workers, source.plan
        self._model, self._parameters = state.model, parameters
        self._trained = laid_out(state.model, parameters.layout.sections)
        self._device = workers.master_device

    def __call__(
        self, step: int, shards: Sequence[Representations], *, training: bool = True
    ) -> BatchLossResult:
        """Return the loss of a batch, in training with its gradients.

        Args:
            shards: all shards of the batch, in order.

        Raises:
            LossError: the result of ``contrast`` is unusable: no loss, no gradient, or a weight of
                0 in training.
            Exception: an error of user code, with a note that names the step.
        """
        here = [shard._replace(tensors=move(shard.tensors, self._device)) for shard in shards]
        whole = join_shards(here).tensors
        group, word = Group([self._device]), "contrast" if training else "contrast in evaluation"
        workers, rows = self._workers, self._plan.batch_rows(step)
        computing, totals = workers.replicas.computing, workers.replicas.totals.wanted
        wanted = {n: t.requires_grad_() for n, t in whole.items() if t.is_floating_point()}
        with (
            as_compute_thread(workers.config.workers.threads, self._device),
            Stream() as stream,
            self._model_is(training=training),
            computing.products(),
            computing.draws(stream, group),
            torch.set_grad_enabled(training),
        ):
            seed = key(word, self._plan.seed, step)
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


def of_shards(result: BatchLossResult, plan: Plan, step: int) -> dict[int, Tensors]:
    """Return the gradients to propagate back through each shard of a step.

    A shard is weighted by its rows, and the sum divided by all rows.
    """
    rows = plan.batch_rows(step)
    return {
        shard: {n: g * (rows / len(plan.shard(step, shard))) for n, g in own.items()}
        for shard, own in result.gradients.items()
    }


def with_loss(total: ShardSum, result: BatchLossResult) -> ShardSum:
    """Return a step's sum with the loss of the whole batch, instead of values from shards."""
    outcome = result.outcome
    if total.missing is not None:
        total.missing -= result.of_parameters.keys()
    total.metrics = structs.replace(outcome, weight=total.weight).weighted()
    total.totals = outcome.totals
    if outcome.denominators is not None:
        total.denominators = replace(outcome.denominators, divisor=total.weight)
    loss = outcome.metrics["loss"]
    total.shares = [share._replace(loss=share.weight * loss) for share in total.shares]
    return total


def training_job_class(workers: WorkerGroup) -> type[Training]:
    """Return the kind of job that workers compute first for each shard."""
    return Training if workers.config.gather is None else Representing


def evaluation_job_class(workers: WorkerGroup) -> type[Evaluation]:
    """Return the kind of job that workers compute for each shard of an evaluation."""
    return Evaluation if workers.config.gather is None else RepresentingInEvaluation


def batch_loss_of(workers: WorkerGroup, state: State, source: Source) -> LocalBatchLoss | None:
    """Return the computation of the loss over whole batches in training; None without such a loss.

    Raises:
        SettingError: the optimizer needs a step's gradient again.
    """
    batch_loss = _local_batch_loss(workers, state, source, state.parameters)
    if batch_loss is None:
        return None
    user_optimizer = state.optimizer.user_optimizer
    if needs_closure(user_optimizer):
        raise SettingError(
            "optimizer",
            type(user_optimizer).__name__,
            "one that steps from one gradient, as the loss is a Gather",
            "take one that needs no closure",
        )
    return batch_loss


def batch_finisher(
    workers: WorkerGroup, state: State, source: Source, parameters: Flat
) -> Callable[[int, ShardSum], ShardSum]:
    """Return the function from a step and its sum to the sum of the batch as a whole.

    Args:
        parameters: the parameters to evaluate.
    """
    batch_loss = _local_batch_loss(workers, state, source, parameters)
    if batch_loss is None:
        return lambda _, total: total

    def finish(step: int, total: ShardSum) -> ShardSum:
        outcome = batch_loss(step, total.represented, training=False).outcome
        metrics, totals = outcome.weighted(), outcome.totals
        return ShardSum(outcome.weight, metrics, totals=totals, denominators=outcome.denominators)

    return finish


def _local_batch_loss(
    workers: WorkerGroup, state: State, source: Source, parameters: Flat
) -> LocalBatchLoss | None:
    gather = workers.config.gather
    if gather is None:
        return None
    if kept := workers.replicas.totals.kept:
        got, expected = ", ".join(kept), "functions of counts, as the loss is a Gather"
        raise SettingError("totals", got, expected, "have contrast return them as metrics")
    return LocalBatchLoss(gather, workers, state, source, parameters)
