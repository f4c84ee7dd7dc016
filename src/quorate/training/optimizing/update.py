"""The update: tree sum, one division, clip, optimizer, schedule, average; if all is finite.

It runs in the coordinator while no worker computes. What works element by element takes all cores
if the vectors are long; what adds elements up adds those of fixed blocks. So the bits do not depend
on the number of workers or cores.
"""

from __future__ import annotations

import copy
import json
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from quorate.training.optimizing.closure import Closure
from quorate.training.optimizing.cores import cores_for, intra_op_threads
from quorate.training.optimizing.extent import Mean, Sliced, Whole
from quorate.training.optimizing.mean import Addition
from quorate.training.optimizing.optimizer import FlatOptimizer
from quorate.training.optimizing.schedule import Schedule, metric_of, scheduler_of

# Computes a step's sum at the parameters as they are, and hands it over: its memory is the workers'
# own afterwards.
Again = Callable[[Callable[[ShardSum], None]], None]

VALIDATION = "validation/"  # before the names of metrics of the validation set, as in summaries

_NOTHING = nullcontext()

LATE_HOOK = (
    "a hook of the optimizer's step was registered after training began, so the hook receives the "
    "vectors that hold the parameters instead of the parameters; register hooks where the "
    "optimizer is made"
)


@dataclass(slots=True)
class Applied:
    """What an update was."""

    metrics: dict[str, float]  # weighted means over all shards, "loss" first
    weight: float
    lr: float  # that the update was made with
    grad_norm: float | None  # of the mean gradient before clipping; None without clip_norm
    missing: frozenset[str]  # parameters without a gradient
    shares: list[Share]  # of each shard
    totals: Counts  # over all shards
    remarks: list[str] = field(default_factory=list)  # for the user
    questions: list[str] = field(default_factory=list)  # why values may not be those meant
    not_finite: list[str] | None = None  # the update was not made: of these the gradient is not

    def worker_losses(self) -> dict[int, tuple[float, float]]:
        """Return worker -> (weighted sum of the loss, weight) over its shards."""
        sums: dict[int, tuple[float, float]] = {}
        for share in self.shares:
            loss, weight = sums.get(share.worker, (0.0, 0.0))
            sums[share.worker] = (loss + share.loss, weight + share.weight)
        return sums


class Average:
    """Exponential moving average of the parameters.

    shadow -= (1 - d) * (shadow - value), with d = min(decay, (1 + n) / (10 + n)) after n updates:
    the ramp of tf.train.ExponentialMovingAverage, without which the start dominates for long.
    """

    def __init__(self, decay: float, parameters: Flat) -> None:
        self._decay = decay
        self._parameters = parameters
        self.shadow = parameters.new()
        self.shadow.copy_(parameters)
        self._pairs = [*zip(self.shadow.vectors, parameters.vectors, strict=True)]

    def of(self, names: Collection[str], decay: float) -> Average:
        """Return what takes in some parameters alone, with a decay of its own, to this shadow."""
        part = copy.copy(self)
        part._decay = decay
        runs = self.shadow.runs(names), self._parameters.runs(names)
        part._pairs = [(mine, theirs) for (mine, _), (theirs, _) in zip(*runs, strict=True)]
        return part

    def update(self, n: int) -> None:
        """Take the parameters in, as they are after update n (from 1)."""
        d = min(self._decay, (1 + n) / (10 + n))
        for mine, theirs in self._pairs:
            mine.lerp_(theirs, 1 - d)


class Update:
    """Applies a step's shards to the parameters.

    Args:
        optimizer: over the coordinator's flat parameters.
        buffers: of the coordinator's model.
        clip_norm: bound on the global norm of the mean gradient; None for no clipping.
        schedule: from the optimizer to a torch scheduler, stepped once per update.
        schedule_metric: what a scheduler goes by that wants a metric: then it is stepped with that.
        average: of the parameters, if they are averaged.
        extent: of the gradients. Default: whole vectors.
    """

    def __init__(
        self,
        optimizer: FlatOptimizer,
        buffers: Buffers,
        *,
        clip_norm: float | None = None,
        schedule: Schedule | None = None,
        schedule_metric: str | None = None,
        average: Average | None = None,
        extent: Whole | Sliced | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.average = average
        self._extent: Whole | Sliced = extent or Whole()
        self._buffers = buffers
        self._clip_norm = clip_norm
        groups = [_plain(group) for group in optimizer.inner.param_groups]
        self.scheduler = None if schedule is None else scheduler_of(schedule, optimizer.inner)
        self._goes_by = metric_of(self.scheduler, schedule_metric)
        # As the script has them: of the schedule first, then of each group of parameters.
        self.hyperparameters = [
            _plain({} if self.scheduler is None else self.scheduler.state_dict()),
            *groups,
        ]
        self.sum_s = 0.0  # that the last mean took: it is one pass with the tree sum
        self.under_way = False  # stays so if an update was cut off: the parameters are half of it

    def apply(
        self,
        parts: Iterable[Part],
        leaves: int,
        n: int,
        present: int,
        again: Again | None = None,
    ) -> Applied:
        """Make update number n (from 1) out of the parts of a tree with ``leaves`` leaves.

        Args:
            present: how many of the leaves there are.
            again: computes them once more, if the optimizer takes a closure.

        Raises:
            LossError: the total weight is zero.
            NotFiniteError: the optimizer moved to where the gradient is not finite.
        """
        # One thread: cores have blocks of their own, and a norm is that of one thread.
        with torch.no_grad(), span("update"), intra_op_threads(1):
            return self._apply(parts, leaves, n, present, again)

    def _apply(
        self, parts: Iterable[Part], leaves: int, n: int, present: int, again: Again | None
    ) -> Applied:
        # 1. What is small, and which gradients are added to which; 2. the mean of those.
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
        # 3. Nothing that is not finite reaches the parameters.
        if not mean.is_finite:
            return self._not_made(total)
        # 4. What else shards hand over; 5. clip; 6. optimizer, schedule, average.
        self.under_way = True
        remarks, questions = list[str](), self._take_beside(total, present)
        lr = self.optimizer.lr
        if self.optimizer.flat and has_step_hooks(self.optimizer.inner):
            remarks.append(LATE_HOOK)
        with self._on_cores():
            if self._clip_norm is not None:
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
                self.average.update(n)
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
        """Make the mean gradient of a sum, in its memory."""
        optimizer, wants_norm = self.optimizer, self._clip_norm is not None
        cores = cores_for(optimizer.elements)
        return self._extent.mean(
            total, additions, optimizer.device, wants_norm=wants_norm, cores=cores
        )

    def _take_beside(self, total: ShardSum, present: int) -> list[str]:
        """Take in what shards hand over beside gradients.

        Returns:
            Why values of buffers may not be those that the script means.
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
        if self._clip_norm is None or mean.norm is None:
            return
        scale = self._clip_norm / (mean.norm + 1e-6)
        if scale < 1:
            mean.gradient.mul_(scale)

    def _step_with_closure(
        self, gradient: Flat, total: ShardSum, n: int, present: int, again: Again
    ) -> None:
        """Step, with gradients of the step at whatever parameters the optimizer moves to."""

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
        """Return what a checkpoint has of how updates are made, for a resume to compare."""
        schedule = None if self.scheduler is None else type(self.scheduler).__name__
        return {"schedule": schedule, "hyperparameters": self.hyperparameters}

    @property
    def can_replay(self) -> bool:
        """Whether the schedule follows from the number of updates alone."""
        return self.scheduler is not None and self._goes_by is None

    def leave_average(self) -> None:
        """Average no parameters: somebody else does."""
        self.average = None

    def leave_schedule(self) -> None:
        """Step no schedule: somebody else does, and sets what it gives."""
        self.scheduler = self._goes_by = None

    def take_whole(self) -> None:
        """Make updates from whole gradients from now on."""
        self._extent = Whole()

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Step a schedule that goes by a metric of the validation set."""
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
        if self.scheduler is not None and self._goes_by is None:
            with warnings.catch_warnings():
                # torch expects an optimizer step between two of a schedule.
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
            not_finite=self._extent.not_finite(total.gradient),
        )

    def _on_cores(self) -> AbstractContextManager[None]:
        """Return a block that has several cores, if the optimizer works element by element."""
        cores = cores_for(self.optimizer.elements) if self.optimizer.flat else 1
        return intra_op_threads(cores) if cores > 1 else _NOTHING


def _copied(gradient: Flat) -> Flat:
    """Return a copy: the memory of a sum is used again while the optimizer may still read it."""
    copied = gradient.layout.new(gradient.device)
    copied.copy_(gradient)
    return copied


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of some settings that JSON can hold, as they come back from it."""
    kept = {}
    for name, value in values.items():
        try:
            kept[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError):  # tensors: parameters, or a learning rate in one
            continue
    return kept
