"""The update: sum of a step, one division, clipping, optimizer, schedule, averaged weights.

A step arrives in parts: sums over subtrees of the V shards, made by workers. The parts are added
along the fixed tree of the V shards (``coordination/tree.py``), and the sum is divided once, by the
total weight. If the mean gradient is finite, the optimizers step; else nothing is changed.

An update is made in the thread of the training loop; on ranks, in each rank at the same time.
Element-wise operations use all cores if the vectors are long; reductions sum over fixed blocks. So
the bits do not depend on the number of workers or cores.

Legend: V shards of a step. ``n`` is the number of an update, from 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
import torch

from quorate.coordination.tree import tree_sum
from quorate.engines.tracing import span
from quorate.errors import LossError, NotFiniteError, UserError
from quorate.replica.buffers import Buffers
from quorate.replica.flat import Flat
from quorate.replica.shard_sum import Part, ShardShare, ShardSum
from quorate.replica.torch_internals import has_step_hooks
from quorate.replica.totals import Counts
from quorate.replica.witness import writes
from quorate.training.optimizing.average import Average
from quorate.training.optimizing.cores import intra_op_threads
from quorate.training.optimizing.mean import Addition, Mean, clip_scale
from quorate.training.optimizing.optimize import Optimize
from quorate.training.optimizing.optimizer import FlatOptimizer
from quorate.training.optimizing.owners import Owners
from quorate.training.optimizing.scheduled_optimizer import ScheduledOptimizer, require_used

# Computes the shards of a step once more, at the current parameters, and returns the result of the
# argument for the new sum. The sum is valid during the call: its memory belongs to the workers.
Recompute = Callable[[Callable[[ShardSum], float]], float]

_SAME_CORES = nullcontext()

LATE_HOOK = (
    "a hook of the optimizer's step was registered after training began, so the hook receives the "
    "vectors that hold the parameters instead of the parameters; register hooks where the "
    "optimizer is made"
)


class UpdateResult(msgspec.Struct, eq=False):
    """The result of an update, made or left out because of a non-finite gradient."""

    metrics: dict[str, float]  # weighted means over all shards, "loss" first
    weight: float  # total weight of the shards
    lrs: list[float]  # the learning rate of each optimizer, before the schedule steps
    grad_norm: float | None  # of the mean gradient before clipping; None without clip_norm
    missing: frozenset[str]  # parameters without a gradient
    shares: list[ShardShare]  # loss and weight of each shard
    totals: Counts  # over all shards
    remarks: list[str] = []  # messages for the user
    buffer_doubts: list[str] = []  # reasons why buffers may be wrong
    # None: the update was made. Else: names of the parameters with a non-finite gradient.
    not_finite: list[str] | None = None
    denominators: dict[str, float] = {}  # by metric, if not ``weight``

    def worker_losses(self) -> dict[int, tuple[float, float]]:
        """Return worker -> (weighted sum of the loss, weight) over its shards."""
        sums: dict[int, tuple[float, float]] = {}
        for share in self.shares:
            loss, weight = sums.get(share.worker, (0.0, 0.0))
            sums[share.worker] = (loss + share.loss, weight + share.weight)
        return sums


class Update:
    """Makes the updates of a phase; a run without phases has one. No other code makes updates.

    Args:
        owners: carry out the decisions of the update: this process, ranks, or servers.
        scheduled: the optimizers over the coordinator's flat parameters, with their schedules.
        buffers: the buffers of the coordinator's model.
        optimize: clipping, and what to do with non-finite gradients.
        average: the average of the parameters; None without averaged weights.

    Attributes:
        owners: as passed; other owners may take over between two updates.
        updates: number of updates so far, made or skipped.
        mean_s: duration of the last mean gradient in seconds, with the additions of parts.
        is_half_made: True during an update, and after an interrupted update: some parameters are
            changed, others not.

    Raises:
        SettingError: no schedule follows the metric of the settings.
    """

    def __init__(
        self,
        owners: Owners,
        scheduled: Sequence[ScheduledOptimizer],
        buffers: Buffers,
        optimize: Optimize,
        average: Average | None = None,
    ) -> None:
        require_used(optimize.schedule_metric, (each.metric for each in scheduled))
        self.owners, self.scheduled = owners, scheduled
        self.optimize, self.average = optimize, average
        self.updates = 0
        self._buffers = buffers
        self._optimizers = [each.optimizer for each in scheduled]
        self.mean_s = 0.0
        self.is_half_made = False

    def apply(
        self,
        parts: Iterable[Part],
        shards: int,
        present: int,
        recompute: Recompute | None = None,
    ) -> UpdateResult:
        """Make the next update from the parts of a step's sum.

        Args:
            parts: sums over subtrees of shards; together the subtrees cover the present shards.
            shards: V.
            present: number of shards in the parts; a quorum may leave out some of the V shards.
            recompute: computes the shards once more, for an optimizer with a closure.

        Raises:
            LossError: the total weight is zero.
            NotFiniteError: the gradient is not finite at the parameters that the optimizer moved
                to.
        """
        # One thread: ``side_by_side`` gives each core its own blocks, and the sum of squares of a
        # block must be that of one thread.
        with torch.set_grad_enabled(False), span("update"), intra_op_threads(1):
            applied = self._apply(parts, shards, self.updates + 1, present, recompute)
        self.updates += applied.not_finite is None
        return applied

    def _apply(
        self, parts: Iterable[Part], shards: int, n: int, present: int, recompute: Recompute | None
    ) -> UpdateResult:
        # 1. Add the small values of the parts along the tree. Gradients are long: list only which
        #    gradient is added to which.
        additions: list[Addition] = []

        def join(left: ShardSum, right: ShardSum) -> ShardSum:
            if left.gradient is not None and right.gradient is not None:
                additions.append((left.gradient, right.gradient))
            return left.join(right)

        total = tree_sum(parts, shards, join, present)
        if total.weight == 0 or total.divisor == 0:
            raise LossError(
                "weight",
                got=f"0 in all {present} shards of update {n}",
                expected="a positive weight in at least one shard",
                fix="give at least one row of each batch a weight",
            )
        # 2. Add the gradients and divide the sum, in one pass over memory.
        began = time.monotonic()
        mean = self._mean(total, additions)
        self.mean_s = time.monotonic() - began
        result = UpdateResult(
            metrics=total.means(),
            weight=total.weight,
            lrs=[each.optimizer.lr for each in self.scheduled],
            grad_norm=mean.norm,
            missing=total.missing or frozenset(),
            shares=total.shares,
            totals=total.totals,
        )
        # 3. Leave the update out if a value is not finite.
        if not mean.is_finite:
            result.not_finite = self.owners.not_finite(mean.gradient)
            return result
        if total.denominators is not None:
            result.denominators = total.denominators.weights
        # 4. Write the buffers, and the parameters written by forward passes, to the model.
        self.is_half_made = True
        if total.has_writes:
            result.buffer_doubts = self._apply_writes(total, present)
        # 5. Clip, and step the optimizers.
        self._clip(mean)
        for each in self.scheduled:
            if each.optimizer.uses_vectors and has_step_hooks(each.optimizer.user_optimizer):
                result.remarks.append(LATE_HOOK)
            try:
                with _on_cores(each.optimizer):
                    if recompute is None:
                        self.owners.step(each.optimizer, mean.gradient, total.missing or ())
                    else:
                        self._step_with_closure(mean.gradient, total, n, present, recompute)
            except UserError:
                raise
            except Exception as error:
                given = "no closure" if recompute is None else "a closure"
                error.add_note(f"quorate: in the optimizer's step(), which is given {given}")
                raise
        # A step with a closure is made for all parameters in each process: nothing to pass on.
        if recompute is None:
            self.owners.publish(self._optimizers)
        # 6. Average the new parameters, and step the schedules.
        if self.average is not None:
            with _on_cores(*self._optimizers):
                self.owners.add_to_average(self.average, n)
        for each in self.scheduled:
            each.step_schedule(result.metrics)
        self.is_half_made = False
        return result

    def _mean(self, total: ShardSum, additions: Sequence[Addition]) -> Mean:
        wants_norm = self.optimize.clip_norm is not None
        return self.owners.mean(total, additions, wants_norm=wants_norm)

    def _apply_writes(self, total: ShardSum, present: int) -> list[str]:
        """Write the buffers, and the parameters written by forward passes, to the model.

        Args:
            present: number of shards in the sum.

        Returns:
            Reasons why buffers may not have the values intended by the script.
        """
        doubts = [
            f"buffer {name!r} looks like a queue of rows: each of {present} shards writes a part, "
            "and the mean over shards, which quorate keeps, destroys the rows; pass shards=1, or "
            "keep the rows in quorate.Shared and write the rows in a callback: see "
            "docs/state-outside-the-model.md"
            for name in self._buffers.take(total.buffers, total.integer_buffers, present)
        ]
        if total.written is not None:
            writes.put(total.written, self.owners.parameters)
        return doubts

    def _clip(self, mean: Mean) -> None:
        """Scale the gradient down to ``clip_norm``, then each optimizer's part to its own limit."""
        clip_norm = self.optimize.clip_norm
        if clip_norm is not None and mean.norm is not None:
            scale = clip_scale(clip_norm, mean.norm)
            if scale < 1:
                with _on_cores(*self._optimizers):
                    mean.gradient.mul_(scale)
        for each in self.scheduled:
            if each.clip_norm is not None:
                self.owners.clip(each.optimizer, mean.gradient, each.clip_norm)

    def _step_with_closure(
        self, gradient: Flat, total: ShardSum, n: int, present: int, recompute: Recompute
    ) -> None:
        """Let the optimizer step with a closure, for gradients at parameters of its choice.

        The first gradient is known already: ``gradient``. The first call is usually made at the
        same parameters, by optimizers with an optional closure too. For a later call, after the
        optimizer has moved the parameters, workers compute the shards of the step once more.

        Args:
            n: the number of this update.

        Raises:
            NotFiniteError: the gradient is not finite at the parameters that the optimizer moved
                to.
        """
        optimizer, missing = self._optimizers[0], total.missing or ()
        gradient, loss = self.owners.gather_gradient(gradient), total.means()["loss"]
        parameters = optimizer.flat_parameters
        before, has_moved = parameters.copied(), False

        def set_gradient(moved: ShardSum) -> float:
            with intra_op_threads(1):  # as in ``apply``
                mean = self._mean(moved, ())
            if not mean.is_finite:
                name = type(optimizer.user_optimizer).__name__
                raise NotFiniteError(
                    f"the loss or its gradient is not finite where {name} moved the parameters in "
                    f"update {n}",
                    fix="lower the learning rate, or resume from the newest checkpoint",
                )
            if moved.has_writes:
                self._apply_writes(moved, present)
            self._clip(mean)
            optimizer.set_gradients(self.owners.gather_gradient(mean.gradient), moved.missing or ())
            return moved.means()["loss"]

        def closure() -> torch.Tensor:
            nonlocal has_moved
            with optimizer.at_home():
                pairs = zip(parameters.vectors, before.vectors, strict=True)
                has_moved = has_moved or any(not torch.equal(now, was) for now, was in pairs)
                if has_moved:
                    return torch.tensor(recompute(set_gradient), dtype=torch.float64)
                # The optimizer may have scaled or dropped the known gradient; and the memory of a
                # sum is reused while the optimizer may read the gradient.
                optimizer.set_gradients(gradient.copied(), missing)
            return torch.tensor(loss, dtype=torch.float64)

        optimizer.step(gradient.copied(), missing, closure)

    # --- beside updates ---------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return the facts about updates that a checkpoint records, for a resume to compare."""
        if not self.optimize.has_optimizer_list:
            return self.scheduled[0].facts()
        several = [{"clip_norm": each.clip_norm, **each.facts()} for each in self.scheduled]
        return {"optimizers": several}

    def leave_average(self) -> None:
        """Stop averaging parameters: another process averages them."""
        self.average = None

    def leave_schedule(self) -> None:
        """Stop stepping schedules: another process steps them and sets the learning rates."""
        for each in self.scheduled:
            each.leave_schedule()

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Step the schedules that follow a metric of the validation set."""
        for each in self.scheduled:
            each.evaluated(metrics)

    def skip(self) -> None:
        """Count an update that was not made: learning rates follow the number of steps."""
        self.updates += 1
        for each in self.scheduled:
            each.skip()


def _on_cores(*optimizers: FlatOptimizer) -> AbstractContextManager[None]:
    """Return a context with several cores, if optimizers work element by element."""
    cores = min([each.cores if each.uses_vectors else 1 for each in optimizers])
    return intra_op_threads(cores) if cores > 1 else _SAME_CORES
