"""Lines for Python's logging: what a program has that trains among other things."""

from __future__ import annotations

import logging
from pathlib import Path

from quorate.callbacks.waiting import at_least
from quorate.services.report import Report
from quorate.training.callbacks import Callback, Run


class LogLines(Callback):
    """Log updates now and then, evaluations, checkpoints, and how it ended.

    Args:
        logger: or its name.
        level: of all lines.
        every_steps: one line per so many updates.

    Raises:
        SettingError: a value cannot work.
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
        """Log where it begins."""
        self._log("training starts after step %d", trainer.global_step)

    def updated(self, report: Report) -> None:
        """Log an update, now and then."""
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
        """Log how it ended."""
        self._log("training ended: %s", reason)

    def _log(self, text: str, *values: object) -> None:
        self._logger.log(self._level, text, *values)


def _words(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
