"""An optimizer of an update with its schedule, and the settings as the script made them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from quorate.errors import SettingError
from quorate.training.optimizing.known_optimizers import values_of
from quorate.training.optimizing.optimizer import FlatOptimizer

Schedule = Callable[[Optimizer], LRScheduler]
VALIDATION = "validation/"  # prefix of the names of validation metrics, as in summaries


class ScheduledOptimizer:
    """An optimizer over flat parameters, its schedule, and a norm for its gradient.

    Args:
        optimizer: the optimizer.
        schedule: makes the schedule; None for constant learning rates.
        metric: the metric for a schedule that follows a metric.
        clip_norm: largest norm of the gradient of the optimizer's own parameters; None: any.

    Raises:
        SettingError: the schedule is not valid.
    """

    def __init__(
        self,
        optimizer: FlatOptimizer,
        schedule: Schedule | None,
        metric: str | None,
        clip_norm: float | None = None,
    ) -> None:
        self.optimizer, self.clip_norm = optimizer, clip_norm
        groups = [_plain(values_of(group)) for group in optimizer.param_groups]
        self.scheduler = (
            None if schedule is None else scheduler_of(schedule, optimizer.user_optimizer)
        )
        self.metric = metric_of(self.scheduler, metric)  # followed by the schedule, if any
        # As set by the script: the schedule's first, then those of each group of parameters.
        self.hyperparameters = [
            _plain({} if self.scheduler is None else self.scheduler.state_dict()),
            *groups,
        ]

    @property
    def can_replay(self) -> bool:
        """True if the schedule follows from the number of updates alone."""
        return self.scheduler is not None and self.metric is None

    def facts(self) -> dict[str, Any]:
        """Return the facts that a checkpoint records, for a resume to compare."""
        schedule = None if self.scheduler is None else type(self.scheduler).__name__
        return {"schedule": schedule, "hyperparameters": self.hyperparameters}

    def step_schedule(self, metrics: Mapping[str, float]) -> None:
        """Step the schedule after an update with some metrics."""
        if self.metric is not None:
            self._step_by(metrics, "")
        elif self.scheduler is not None:
            self.scheduler.step()

    def skip(self) -> None:
        """Step the schedule for an update not made: learning rates follow the number of steps."""
        if self.can_replay:
            assert self.scheduler is not None
            with warnings.catch_warnings():
                # torch expects an optimizer step between two steps of a schedule.
                warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
                self.scheduler.step()

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Step a schedule that follows a metric of the validation set."""
        if self.metric is not None:
            self._step_by(metrics, VALIDATION)

    def leave_schedule(self) -> None:
        """Stop stepping the schedule: another process steps it and sets the learning rates."""
        self.scheduler = self.metric = None

    def _step_by(self, metrics: Mapping[str, float], prefix: str) -> None:
        assert self.metric is not None
        name = self.metric.removeprefix(prefix)
        if self.metric.startswith(VALIDATION) != bool(prefix):
            return
        if name not in metrics:
            known = ", ".join(f"{prefix}{known}" for known in sorted(metrics))
            fix = "the loss function names them"
            raise SettingError("schedule_metric", self.metric, f"one of {known}", fix)
        scheduler: Any = self.scheduler
        scheduler.step(metrics[name])


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that JSON can hold, as JSON returns them."""
    kept = {}
    for name, value in values.items():
        try:
            kept[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError):  # tensors: parameters, or a learning rate held in a tensor
            continue
    return kept


def metric_of(scheduler: LRScheduler | None, metric: str | None) -> str | None:
    """Return the metric for the scheduler's steps; None for a scheduler counting updates.

    Raises:
        SettingError: the scheduler wants a metric and has none.
    """
    if not isinstance(scheduler, ReduceLROnPlateau):
        return None
    if metric is None:
        expected = "the name of a metric, as ReduceLROnPlateau goes by one"
        fix = 'for example schedule_metric="validation/loss"'
        raise SettingError("schedule_metric", metric, expected, fix)
    return metric


def require_used(metric: str | None, used: Iterable[str | None]) -> None:
    """Check that a schedule follows the metric of the settings.

    Args:
        used: the metric of each schedule of an update.

    Raises:
        SettingError: no schedule follows the metric.
    """
    if metric is not None and not any(used):
        expected = "None, as the schedule counts updates"
        raise SettingError("schedule_metric", metric, expected, "leave it out")


def scheduler_of(schedule: Schedule, optimizer: Optimizer) -> LRScheduler:
    """Return the scheduler that a function makes for an optimizer.

    Raises:
        SettingError: the result is no scheduler, or belongs to another optimizer.
    """
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
