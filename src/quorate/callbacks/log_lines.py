"""Lines for Python's logging, for programs that do more than train."""

from __future__ import annotations

import logging
from pathlib import Path

from quorate.callbacks.waiting import at_least
from quorate.services.report import Report
from quorate.training.callbacks import Callback, Run


class LogLines(Callback):
    """Log updates, evaluations, checkpoints and the end of training to Python's logging.

    Args:
        logger: a logger, or the name of a logger. Default: "quorate.run".
        level: level of all lines. Default: ``logging.INFO``.
        every_steps: number of updates between two lines. Default: 50.

    Raises:
        SettingError: a value is not valid.
    """

    def __init__(
        self,
        logger: logging.Logger | str = "quorate.run",
        *,
        level: int = logging.INFO,
        every_steps: int = 50,
    ) -> None:
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger
        self._level = level
        self._every_steps = at_least("every_steps", every_steps, 1)

    def started(self, trainer: Run) -> None:
        """Log the step at which training begins."""
        self._log("training starts after step %d", trainer.global_step)

    def updated(self, report: Report) -> None:
        """Log a line every ``every_steps`` updates."""
        if report.global_step % self._every_steps == 0:
            found = _words(report.metrics)
            self._log("step %d of %d: %s", report.global_step, report.last_step, found)

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        """Log an evaluation."""
        self._log("step %d: validation: %s", global_step, _words(metrics))

    def saved(self, global_step: int, path: Path) -> None:
        """Log a checkpoint."""
        self._log("saved step %d to %s", global_step, path)

    def stopped(self, reason: str) -> None:
        """Log the reason for the end of training."""
        self._log("training ended: %s", reason)

    def _log(self, text: str, *values: object) -> None:
        self._logger.log(self._level, text, *values)


def _words(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
