"""A plateau: learning rates are reduced when a metric gets no better."""

from __future__ import annotations

from typing import Any

import torch

from quorate.callbacks.waiting import Waiting, at_least
from quorate.errors import SettingError
from quorate.training.callbacks import Callback, Run


class ReduceLROnPlateau(Callback):
    """Reduce the learning rate of all groups when a metric of the validation set gets no better.

    ``Optimize(schedule=)`` with torch's own of this name, and ``schedule_metric``, does nearly the
    same. This one needs no schedule, and may not be combined with one, which would set the rates.

    Args:
        metric: of the validation set: "loss", "accuracy".
        mode: "min" if less is better, "max" if more is.
        factor: by which rates are multiplied, between 0 and 1.
        patience: how many evaluations in a row may be no better, before the next one counts.
        min_delta: by how much it has to be better to count.
        cooldown: evaluations after a reduction that do not count.
        min_lr: no rate gets smaller.

    Raises:
        SettingError: a value cannot work.
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
        self._waiting = Waiting(metric, mode, min_delta)
        self.metrics = (self._waiting.metric,)
        self._factor, self._min_lr = factor, min_lr
        self._patience = at_least("patience", patience, 0)
        self._cooldown = at_least("cooldown", cooldown, 0)
        self._rests = 0  # evaluations that do not count yet
        self._trainer: Run | None = None

    def started(self, trainer: Run) -> None:
        """Look whether there is a schedule, which would set the rates too.

        Raises:
            SettingError: there is one.
        """
        self._trainer = trainer
        if any("initial_lr" in group for group in trainer.param_groups):
            expected = "no schedule, which sets the learning rates too"
            fix = "leave one of them out, or use Optimize(schedule_metric=)"
            raise SettingError("ReduceLROnPlateau", "a schedule", expected, fix)

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:  # noqa: ARG002
        """Look whether it is better, and reduce the rates if it was not for long enough."""
        self._waiting.takes(metrics)
        if self._rests:
            self._rests -= 1
            self._waiting.since = 0
        if self._waiting.since > self._patience:
            self._reduce()
            self._rests, self._waiting.since = self._cooldown, 0

    def state_dict(self) -> dict[str, Any]:
        """Return what to save; the rates are in the optimizer's state."""
        return {**self._waiting.state_dict(), "rests": self._rests}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what was saved."""
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
