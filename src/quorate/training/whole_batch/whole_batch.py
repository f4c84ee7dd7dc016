"""A step of a loss over the whole batch: from representations of all shards to one gradient.

    main job     each shard: forward                                   Representing
    here         all rows: the loss, its gradient by representations   LocalBatchLoss
    inner job    each shard: forward again, backward of its part       BackThrough
    here         ordered sum, plus the loss's own gradient of parameters; then the usual update

The inner job is dealt like any step: the shards of a worker that is slow, raises or dies are
computed by other workers, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from msgspec import structs

from quorate.coordination.plan import Plan
from quorate.data.source import Source
from quorate.engines.job import Evaluation, Training
from quorate.errors import SettingError
from quorate.replica.flat import Flat
from quorate.replica.shard_sum import ShardSum
from quorate.replica.whole_batch.represented import Representations, Tensors
from quorate.training.optimizing.closure import needs_closure
from quorate.training.state import State
from quorate.training.whole_batch.jobs import Representing, RepresentingInEvaluation
from quorate.training.whole_batch.local_batch_loss import BatchLossResult, LocalBatchLoss
from quorate.training.worker_group import WorkerGroup


class BatchLoss(Protocol):
    """Computes the loss over a batch: ``LocalBatchLoss``, or ``RankBatchLoss``."""

    def __call__(
        self, step: int, shards: Sequence[Representations], rows: int, *, training: bool
    ) -> BatchLossResult:
        """Return the loss, with gradients for the shards that this process computes again."""

    def add_to(self, gradient: Flat, own: Tensors) -> None:
        """Add gradients by parameters to the gradient of a step."""


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


def made_whole(
    workers: WorkerGroup, state: State, source: Source, parameters: Flat
) -> Callable[[int, ShardSum], ShardSum]:
    """Return the function from a step and its sum to the sum of the batch as a whole.

    Args:
        parameters: the parameters to evaluate.
    """
    batch_loss = _local_batch_loss(workers, state, source, parameters)
    if batch_loss is None:
        return lambda _, total: total

    def whole(step: int, total: ShardSum) -> ShardSum:
        rows = source.plan.batch_rows(step)
        outcome = batch_loss(step, total.represented, rows, training=False).outcome
        metrics, totals = outcome.weighted(), outcome.totals
        return ShardSum(outcome.weight, metrics, totals=totals, denominators=outcome.denominators)

    return whole


def _local_batch_loss(
    workers: WorkerGroup, state: State, source: Source, parameters: Flat
) -> LocalBatchLoss | None:
    gather, config = workers.config.gather, workers.config
    if gather is None:
        return None
    if kept := workers.replicas.totals.kept:
        got, expected = ", ".join(kept), "functions of counts, as the loss is a Gather"
        raise SettingError("totals", got, expected, "have contrast return them as metrics")
    return LocalBatchLoss(
        gather,
        state.model,
        parameters,
        workers.replicas,
        device=workers.master_device,
        threads=config.workers.threads,
        seed=source.plan.seed,
    )
