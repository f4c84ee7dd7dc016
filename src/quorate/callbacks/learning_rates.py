"""Learning rates of all parameter groups, by name."""

from __future__ import annotations

from quorate.callbacks.waiting import at_least
from quorate.services.report import Report
from quorate.training.callbacks import Callback, Run


def learning_rates(trainer: Run) -> dict[str, float]:
    """Return the learning rate of each group of the optimizer: "lr/0", or by the group's name."""
    return {
        f"lr/{group.get('name', number)}": float(group["lr"])
        for number, group in enumerate(trainer.param_groups)
    }


class LearningRateMonitor(Callback):
    """Write the learning rates of all parameter groups to TensorBoard, as of the next update.

    ``WandB`` and ``MLflow`` log the learning rates without this callback. ``Report.lr`` is the
    learning rate of the first group.

    Args:
        every_steps: number of updates between two points. Default: 50.

    Raises:
        SettingError: a value is not valid.
    """

    def __init__(self, every_steps: int = 50) -> None:
        self._every_steps = at_least("every_steps", every_steps, 1)
        self._trainer: Run | None = None

    def started(self, trainer: Run) -> None:
        """Keep the trainer."""
        self._trainer = trainer

    def updated(self, report: Report) -> None:
        """Write a point every ``every_steps`` updates."""
        n, trainer = report.global_step, self._trainer
        if n % self._every_steps == 0 and trainer is not None and trainer.summaries is not None:
            for name, rate in learning_rates(trainer).items():
                trainer.summaries.add_scalar(name, rate, n)
