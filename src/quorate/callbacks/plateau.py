"""Reduction of the learning rates when a metric stops improving."""

from __future__ import annotations

from typing import Any

import torch

from quorate.callbacks.waiting import PatienceCount, at_least
from quorate.errors import SettingError
from quorate.training.callbacks import Callback, Run


class ReduceLROnPlateau(Callback):
    """Reduce all learning rates when a validation metric stops improving.

    ``Optimize(schedule=)`` with torch's scheduler of the same name, and ``schedule_metric``, does
    nearly the same. This callback needs no schedule, and cannot be combined with a schedule,
    because both would set the learning rates.

    Args:
        metric: name of a metric of the validation set: "loss", "accuracy". Default: "loss".
        mode: "min" if lower is better (the default), "max" if higher is better.
        factor: factor for the learning rates at a reduction, between 0 and 1. Default: 0.1.
        patience: number of consecutive evaluations without improvement to tolerate; the next such
            evaluation reduces the learning rates. Default: 10.
        min_delta: smallest change that counts as an improvement. Default: 0.
        cooldown: number of evaluations to ignore after a reduction. Default: 0.
        min_lr: lower bound of the learning rates. Default: 0.

    Raises:
        SettingError: a value is not valid.
    """

    def __init__(
        self,
        metric: str = "loss",
        *,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        min_delta: float = 0.0,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        if not 0 < factor < 1:
            raise SettingError(
                "factor", factor, "a number between 0 and 1", "for example factor=0.1"
            )
        self._waiting = PatienceCount(metric, mode, min_delta)
        self.metrics = (self._waiting.metric,)
        self._factor, self._min_lr = factor, min_lr
        self._patience = at_least("patience", patience, 0)
        self._cooldown = at_least("cooldown", cooldown, 0)
        self._rests = 0  # evaluations of the cooldown left
        self._trainer: Run | None = None

    def started(self, trainer: Run) -> None:
        """Check that no schedule sets the learning rates too.

        Raises:
            SettingError: the run has a schedule.
        """
        self._trainer = trainer
        if any("initial_lr" in group for group in trainer.param_groups):
            expected = "no schedule, which sets the learning rates too"
            fix = "leave one of them out, or use Optimize(schedule_metric=)"
            raise SettingError("ReduceLROnPlateau", "a schedule", expected, fix)

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:  # noqa: ARG002
        """Compare the metric with the best value; reduce the rates if ``patience`` is used up."""
        self._waiting.takes(metrics)
        if self._rests:
            self._rests -= 1
            self._waiting.since = 0
        if self._waiting.since > self._patience:
            self._reduce()
            self._rests, self._waiting.since = self._cooldown, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save. The learning rates are part of the optimizer's state."""
        return {**self._waiting.state_dict(), "rests": self._rests}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the saved state."""
        self._waiting.load_state_dict(state)
        self._rests = state["rests"]

    def _reduce(self) -> None:
        assert self._trainer is not None
        for group in self._trainer.param_groups:
            rate = max(float(group["lr"]) * self._factor, self._min_lr)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
