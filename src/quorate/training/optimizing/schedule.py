"""The schedule of learning rates: torch's scheduler, made by the user's function and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from quorate.errors import SettingError

Schedule = Callable[[Optimizer], LRScheduler]


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
