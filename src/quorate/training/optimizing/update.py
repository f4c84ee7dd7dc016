"""The update: tree sum, one division, clip, optimizer, schedule, average; if all is finite.

It runs in the coordinator while no worker computes. What works element by element takes all cores
if the vectors are long; what adds elements up takes one. So the bits do not depend on the number of
workers or cores.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from quorate.coordination.tree import tree_sum
from quorate.errors import LossError, NotFiniteError, SettingError, UserError
from quorate.machine.cores import usable_cores
from quorate.replica.buffers import Buffers
from quorate.replica.flat import Flat
from quorate.replica.shard_sum import Part, ShardSum, Share
from quorate.replica.torch_internals import has_step_hooks
from quorate.replica.totals import Counts
from quorate.replica.witness import writes
from quorate.training.optimizing.closure import Closure
from quorate.training.optimizing.extent import Sliced, Whole
from quorate.training.optimizing.optimizer import FlatOptimizer

Schedule = Callable[[Optimizer], LRScheduler]
# Computes a step's sum at the parameters as they are, and hands it over: its memory is the workers'
# own afterwards.
Again = Callable[[Callable[[ShardSum], None]], None]

VALIDATION = "validation/"  # before the names of metrics of the validation set, as in summaries

# With fewer elements one core is as good: OpenMP's threads spin for milliseconds when they are
# done, on the cores that workers need next.
ALL_CORES_FROM = 1 << 24

LATE_HOOK = (
    "a hook of the optimizer's step was registered after training began: it is given the vectors "
    "that parameters lie in, and not the parameters; register it where the optimizer is made"
)


@dataclass(frozen=True)
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
    not_finite: list[str] | None = None  # the update was not made: of these the gradient is not


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

    def update(self, n: int) -> None:
        """Take the parameters in, as they are after update n (from 1)."""
        d = min(self._decay, (1 + n) / (10 + n))
        for mine, theirs in zip(self.shadow.vectors, self._parameters.vectors, strict=True):
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
        self.scheduler = None if schedule is None else _scheduler(schedule, optimizer.inner)
        self._goes_by = _goes_by(self.scheduler, schedule_metric)
        # As the script has them: of the schedule first, then of each group of parameters.
        self.hyperparameters = [
            _plain({} if self.scheduler is None else self.scheduler.state_dict()),
            *groups,
        ]
        self.sum_s = 0.0  # that the last tree sum took
        self.under_way = False  # stays so if an update was cut off: the parameters are half of it

    @torch.no_grad()
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
        # 1. Tree sum, in the memory of the leftmost part.
        began = time.monotonic()
        with self._cores():
            total = tree_sum(parts, leaves, ShardSum.add, present)
        self.sum_s = time.monotonic() - began
        assert total.gradient is not None
        if total.weight == 0:
            raise LossError(
                f"weight: it is 0 in all {present} shards of update {n}; a mean over nothing has "
                "no gradient: give at least one row of a batch a weight"
            )
        # 2. Nothing that is not finite reaches the parameters.
        if not self._extent.is_finite(total):
            return self._not_made(total)
        # 3. One division by the total weight; 4. clip.
        self.under_way = True
        gradient, grad_norm, remarks = self._mean(total, present)
        # 5. Optimizer, schedule, average.
        lr = self.optimizer.lr
        if self.optimizer.flat and has_step_hooks(self.optimizer.inner):
            remarks.append(LATE_HOOK)
        with self._cores():
            try:
                if again is None:
                    self.optimizer.step(gradient, total.missing or ())
                else:
                    self._step_with_closure(gradient, total, n, present, again)
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
            grad_norm=grad_norm,
            missing=total.missing or frozenset(),
            shares=total.shares,
            totals=total.totals,
            remarks=remarks,
        )

    def _mean(self, total: ShardSum, present: int) -> tuple[Flat, float | None, list[str]]:
        """Make the mean gradient of a sum, in its memory, and take in what shards wrote.

        Returns:
            It, its norm before it was clipped, if it was to be, and remarks for the user.
        """
        assert total.gradient is not None
        gradient = total.gradient.on(self.optimizer.device)
        with self._cores():
            gradient.div_(total.weight)
        remarks = [
            f"buffer {name!r}: a shard writes a part of it, as of a queue or a memory of rows, and "
            "what several shards write becomes their mean: with shards=1 it is what plain torch "
            "would make of it"
            for name in self._buffers.take(total.buffers, total.integer_buffers, present)
        ]
        if total.written is not None:
            writes.put(total.written, self.optimizer.flat_parameters)
        if self._clip_norm is None:
            return gradient, None, remarks
        with intra_op_threads(1):  # the norm is that of the whole batch
            return gradient, self._clip(gradient, self._clip_norm), remarks

    def _clip(self, gradient: Flat, most: float) -> float:
        """Scale the gradient down to a norm of ``most``, as torch's clip_grad_norm_ does."""
        norm = self._extent.norm(gradient)
        scale = most / (norm + 1e-6)
        if scale < 1:
            gradient.mul_(scale)
        return norm

    def _step_with_closure(
        self, gradient: Flat, total: ShardSum, n: int, present: int, again: Again
    ) -> None:
        """Step, with gradients of the step at whatever parameters the optimizer moves to."""

        def compute() -> float:
            found = {}

            def take(total: ShardSum) -> None:
                if not self._extent.is_finite(total):
                    name = type(self.optimizer.inner).__name__
                    raise NotFiniteError(
                        f"the loss or its gradient is not finite where {name} moved to in update "
                        f"{n}; lower the learning rate, or go on from the newest checkpoint"
                    )
                mean, _, _ = self._mean(total, present)
                self.optimizer.take(self.optimizer.whole_of(mean), total.missing or ())
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

    @property
    def can_replay(self) -> bool:
        """Whether the schedule follows from the number of updates alone."""
        return self.scheduler is not None and self._goes_by is None

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

    def _cores(self) -> AbstractContextManager[None]:
        """All cores for what gives the same bits on any number of them."""
        many = self.optimizer.flat and self.optimizer.elements >= ALL_CORES_FROM
        return intra_op_threads(usable_cores() if many else 1)


@contextmanager
def intra_op_threads(threads: int) -> Iterator[None]:
    """Within the block this thread's operations use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _copied(gradient: Flat) -> Flat:
    """Return a copy: the memory of a sum is used again while the optimizer may still read it."""
    copied = gradient.layout.new(gradient.device)
    copied.copy_(gradient)
    return copied


def _goes_by(scheduler: LRScheduler | None, metric: str | None) -> str | None:
    """Return the metric that a scheduler is stepped with; None for one that counts updates.

    Raises:
        SettingError: it wants one and has none, or the other way round.
    """
    wants = isinstance(scheduler, ReduceLROnPlateau)
    if wants and metric is None:
        expected = "the name of a metric, as ReduceLROnPlateau goes by one"
        fix = 'for example schedule_metric="validation/loss"'
        raise SettingError("schedule_metric", metric, expected, fix)
    if metric is not None and not wants:
        expected = "None, as the schedule counts updates"
        raise SettingError("schedule_metric", metric, expected, "leave it out")
    return metric


def _scheduler(schedule: Schedule, optimizer: Optimizer) -> LRScheduler:
    scheduler = schedule(optimizer)
    if not isinstance(scheduler, LRScheduler):
        raise SettingError(
            "schedule",
            type(scheduler).__name__,
            "a function from an optimizer to a torch LR scheduler",
            "for example lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1000)",
        )
    if scheduler.optimizer is not optimizer:
        raise SettingError(
            "schedule",
            "a scheduler of another optimizer",
            "one of the optimizer that the function is given",
            "use its argument",
        )
    return scheduler


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of some settings that JSON can hold, as they come back from it."""
    kept = {}
    for name, value in values.items():
        try:
            kept[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError):  # tensors: parameters, or a learning rate in one
            continue
    return kept
