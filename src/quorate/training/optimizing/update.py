"""The update: tree sum, one division, clip, optimizer, schedule, average; if all is finite.

The update runs in the coordinator while no worker computes. Element-wise operations use all cores
if the vectors are long; reductions sum over fixed blocks. So the bits do not depend on the number
of workers or cores.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from quorate.coordination.tree import tree_sum
from quorate.engines.tracing import span
from quorate.errors import LossError, NotFiniteError, SettingError, UserError
from quorate.replica.buffers import Buffers
from quorate.replica.flat import Flat
from quorate.replica.shard_sum import Part, ShardSum, Share
from quorate.replica.torch_internals import has_step_hooks
from quorate.replica.totals import Counts
from quorate.replica.witness import writes
from quorate.training.optimizing.average import Average
from quorate.training.optimizing.closure import Closure
from quorate.training.optimizing.cores import intra_op_threads
from quorate.training.optimizing.mean import Addition, Mean
from quorate.training.optimizing.optimize import Optimize
from quorate.training.optimizing.optimizer import FlatOptimizer
from quorate.training.optimizing.schedule import metric_of, scheduler_of

# Computes a step's sum at the current parameters, and passes it on. Afterwards the memory of the
# sum is the workers' again.
Again = Callable[[Callable[[ShardSum], None]], None]

VALIDATION = "validation/"  # prefix of the names of validation metrics, as in summaries

_NOTHING = nullcontext()

LATE_HOOK = (
    "a hook of the optimizer's step was registered after training began, so the hook receives the "
    "vectors that hold the parameters instead of the parameters; register hooks where the "
    "optimizer is made"
)


@dataclass(slots=True)
class Applied:
    """The result of an update."""

    metrics: dict[str, float]  # weighted means over all shards, "loss" first
    weight: float
    lr: float  # the learning rate of the update
    grad_norm: float | None  # of the mean gradient before clipping; None without clip_norm
    missing: frozenset[str]  # parameters without a gradient
    shares: list[Share]  # of each shard
    totals: Counts  # over all shards
    remarks: list[str] = field(default_factory=list)  # messages for the user
    questions: list[str] = field(default_factory=list)  # reasons why buffers may be wrong
    not_finite: list[str] | None = None  # names, if the gradient is not finite: no update was made

    def worker_losses(self) -> dict[int, tuple[float, float]]:
        """Return worker -> (weighted sum of the loss, weight) over its shards."""
        sums: dict[int, tuple[float, float]] = {}
        for share in self.shares:
            loss, weight = sums.get(share.worker, (0.0, 0.0))
            sums[share.worker] = (loss + share.loss, weight + share.weight)
        return sums


class Update:
    """The application of steps to the parameters of a phase: the only update there is.

    Args:
        optimizer: the optimizer over the coordinator's flat parameters.
        buffers: the buffers of the coordinator's model.
        optimize: the schedule, clipping, and what to do with non-finite gradients.
        average: the average of the parameters, if they are averaged.

    Attributes:
        updates: number of updates so far, made or skipped.
    """

    def __init__(
        self,
        optimizer: FlatOptimizer,
        buffers: Buffers,
        optimize: Optimize,
        average: Average | None = None,
    ) -> None:
        self.optimizer, self.optimize = optimizer, optimize
        self.average = average
        self.updates = 0
        self._buffers = buffers
        groups = [_plain(group) for group in optimizer.inner.param_groups]
        self.scheduler = None
        if optimize.schedule is not None:
            self.scheduler = scheduler_of(optimize.schedule, optimizer.inner)
        self._goes_by = metric_of(self.scheduler, optimize.schedule_metric)
        # As set by the script: the schedule's first, then those of each group of parameters.
        self.hyperparameters = [
            _plain({} if self.scheduler is None else self.scheduler.state_dict()),
            *groups,
        ]
        self.sum_s = 0.0  # duration of the last mean, which is one pass with the tree sum
        self.under_way = False  # True after an interrupted update: parameters are half updated

    def apply(
        self,
        parts: Iterable[Part],
        leaves: int,
        present: int,
        again: Again | None = None,
    ) -> Applied:
        """Make the next update from the parts of a tree with ``leaves`` leaves.

        Args:
            present: number of leaves that are present.
            again: computes the leaves once more, if the optimizer takes a closure.

        Raises:
            LossError: the total weight is zero.
            NotFiniteError: the gradient is not finite at the parameters that the optimizer moved
                to.
        """
        # One thread: cores have blocks of their own, and the norm is that of one thread.
        with torch.no_grad(), span("update"), intra_op_threads(1):
            applied = self._apply(parts, leaves, self.updates + 1, present, again)
        self.updates += applied.not_finite is None
        return applied

    def _apply(
        self, parts: Iterable[Part], leaves: int, n: int, present: int, again: Again | None
    ) -> Applied:
        # 1. Sum small values, and list which gradients are added to which; 2. their mean.
        additions: list[Addition] = []

        def join(left: ShardSum, right: ShardSum) -> ShardSum:
            if left.gradient is not None and right.gradient is not None:
                additions.append((left.gradient, right.gradient))
            return left.join(right)

        total = tree_sum(parts, leaves, join, present)
        if total.weight == 0:
            raise LossError(
                "weight",
                got=f"0 in all {present} shards of update {n}",
                expected="a positive weight in at least one shard",
                fix="give at least one row of each batch a weight",
            )
        began = time.monotonic()
        mean = self._mean(total, additions)
        self.sum_s = time.monotonic() - began
        # 3. Keep non-finite values from the parameters.
        if not mean.is_finite:
            return self._not_made(total)
        # 4. Further results of shards; 5. clip; 6. optimizer, schedule, average.
        self.under_way = True
        remarks, questions = list[str](), self._take_beside(total, present)
        lr = self.optimizer.lr
        if self.optimizer.flat and has_step_hooks(self.optimizer.inner):
            remarks.append(LATE_HOOK)
        with self._on_cores():
            self._clip(mean)
            try:
                if again is None:
                    self.optimizer.step(mean.gradient, total.missing or ())
                else:
                    self._step_with_closure(mean.gradient, total, n, present, again)
            except UserError:
                raise
            except Exception as error:
                given = "no closure" if again is None else "a closure"
                error.add_note(f"quorate: in the optimizer's step(), which is given {given}")
                raise
            if self.average is not None:
                self.optimizer.add_to_average(self.average, n)
        metrics = total.means()
        if self._goes_by is not None:
            self._step_by(metrics, "")
        elif self.scheduler is not None:
            self.scheduler.step()
        self.under_way = False
        return Applied(
            metrics=metrics,
            weight=total.weight,
            lr=lr,
            grad_norm=mean.norm,
            missing=total.missing or frozenset(),
            shares=total.shares,
            totals=total.totals,
            remarks=remarks,
            questions=questions,
        )

    def _mean(self, total: ShardSum, additions: Sequence[Addition]) -> Mean:
        wants_norm = self.optimize.clip_norm is not None
        return self.optimizer.mean(total, additions, wants_norm=wants_norm)

    def _take_beside(self, total: ShardSum, present: int) -> list[str]:
        """Apply the results of shards beside gradients: buffers, and values written to parameters.

        Returns:
            Reasons why buffers may not have the values intended by the script.
        """
        if total.buffers is None and total.integer_buffers is None and total.written is None:
            return []
        questions = [
            f"buffer {name!r} looks like a queue of rows: each of {present} shards writes a part, "
            "and the mean over shards, which quorate keeps, destroys the rows; pass shards=1, or "
            "keep the rows in quorate.Shared and write the rows in a callback: see "
            "docs/state-outside-the-model.md"
            for name in self._buffers.take(total.buffers, total.integer_buffers, present)
        ]
        if total.written is not None:
            writes.put(total.written, self.optimizer.flat_parameters)
        return questions

    def _clip(self, mean: Mean) -> None:
        """Scale a gradient down to a norm of ``clip_norm``, as torch's clip_grad_norm_ does."""
        clip_norm = self.optimize.clip_norm
        if clip_norm is None or mean.norm is None:
            return
        scale = clip_norm / (mean.norm + 1e-6)
        if scale < 1:
            mean.gradient.mul_(scale)

    def _step_with_closure(
        self, gradient: Flat, total: ShardSum, n: int, present: int, again: Again
    ) -> None:
        """Make a step with a closure: compute gradients wherever the optimizer moves parameters."""

        def compute() -> float:
            found = {}

            def take(total: ShardSum) -> None:
                with intra_op_threads(1):  # as in ``apply``
                    mean = self._mean(total, ())
                if not mean.is_finite:
                    name = type(self.optimizer.inner).__name__
                    raise NotFiniteError(
                        f"the loss or its gradient is not finite where {name} moved the "
                        f"parameters in update {n}",
                        fix="lower the learning rate, or resume from the newest checkpoint",
                    )
                self._take_beside(total, present)
                self._clip(mean)
                self.optimizer.take(self.optimizer.whole_of(mean.gradient), total.missing or ())
                found["loss"] = total.means()["loss"]

            again(take)
            return found["loss"]

        optimizer, missing, loss = self.optimizer, total.missing or (), total.means()["loss"]
        gradient = optimizer.whole_of(gradient)

        def known() -> float:
            optimizer.take(_copied(gradient), missing)
            return loss

        closure = Closure(known, optimizer.flat_parameters, compute, optimizer.at_home)
        optimizer.step(_copied(gradient), missing, closure)

    def facts(self) -> dict[str, Any]:
        """Return the facts about updates that a checkpoint records, for a resume to compare."""
        schedule = None if self.scheduler is None else type(self.scheduler).__name__
        return {"schedule": schedule, "hyperparameters": self.hyperparameters}

    @property
    def can_replay(self) -> bool:
        """True if the schedule follows from the number of updates alone."""
        return self.scheduler is not None and self._goes_by is None

    def leave_average(self) -> None:
        """Stop averaging parameters: another process averages them."""
        self.average = None

    def leave_schedule(self) -> None:
        """Stop stepping the schedule: another process steps it and sets the learning rates."""
        self.scheduler = self._goes_by = None

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Step a schedule that follows a metric of the validation set."""
        if self._goes_by is not None:
            self._step_by(metrics, VALIDATION)

    def _step_by(self, metrics: Mapping[str, float], prefix: str) -> None:
        assert self._goes_by is not None
        name = self._goes_by.removeprefix(prefix)
        if self._goes_by.startswith(VALIDATION) != bool(prefix):
            return
        if name not in metrics:
            known = ", ".join(f"{prefix}{known}" for known in sorted(metrics))
            fix = "the loss function names them"
            raise SettingError("schedule_metric", self._goes_by, f"one of {known}", fix)
        scheduler: Any = self.scheduler
        scheduler.step(metrics[name])

    def skip(self) -> None:
        """Count an update that was not made: learning rates follow the number of steps."""
        self.updates += 1
        if self.scheduler is not None and self._goes_by is None:
            with warnings.catch_warnings():
                # torch expects an optimizer step between two steps of a schedule.
                warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
                self.scheduler.step()

    def _not_made(self, total: ShardSum) -> Applied:
        assert total.gradient is not None
        return Applied(
            metrics=total.means(),
            weight=total.weight,
            lr=self.optimizer.lr,
            grad_norm=None,
            missing=total.missing or frozenset(),
            shares=total.shares,
            totals=total.totals,
            not_finite=self.optimizer.not_finite(total.gradient),
        )

    def _on_cores(self) -> AbstractContextManager[None]:
        """Return a context with several cores, if the optimizer works element by element."""
        cores = self.optimizer.cores if self.optimizer.flat else 1
        return intra_op_threads(cores) if cores > 1 else _NOTHING


def _copied(gradient: Flat) -> Flat:
    """Return a copy: the memory of a sum is reused while the optimizer may read the gradient."""
    copied = gradient.layout.new(gradient.device)
    copied.copy_(gradient)
    return copied


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that JSON can hold, as JSON returns them."""
    kept = {}
    for name, value in values.items():
        try:
            kept[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError):  # tensors: parameters, or a learning rate held in a tensor
            continue
    return kept
