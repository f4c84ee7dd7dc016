"""Callbacks for a metric that stops improving: early stopping, and lower learning rates."""

from __future__ import annotations

import math
from typing import Any

import torch

from quorate.errors import SettingError
from quorate.settings import integer
from quorate.training.callbacks import Callback, Run

MODES = ("min", "max")


def at_least(name: str, value: int, least: int) -> int:
    """Return a whole number after checking its lower bound.

    Raises:
        SettingError: the value is no whole number, or too small.
    """
    return integer(name, value, least=least, fix=f"for example {name}={least}")


class PatienceCount:
    """A count of the evaluations since the best value of a metric.

    Args:
        metric: name of a metric of the validation set.
        mode: "min" if lower is better, "max" if higher is better.
        min_delta: smallest change that counts as an improvement.

    Raises:
        SettingError: a value is not valid.
    """

    def __init__(self, metric: str, mode: str, min_delta: float) -> None:
        if mode not in MODES:
            raise SettingError("mode", mode, "min or max", "for example mode='max'")
        if not min_delta >= 0 or math.isinf(min_delta):
            raise SettingError("min_delta", min_delta, "a finite number >= 0", "leave it out")
        self.metric = metric.removeprefix("validation/")
        self._sign = 1.0 if mode == "max" else -1.0
        self._min_delta = min_delta
        self.best: float | None = None
        self.since = 0  # evaluations since the best value

    def takes(self, metrics: dict[str, float]) -> bool:
        """Count an evaluation, and return whether it is the best so far; NaN never is.

        Raises:
            SettingError: the metric does not exist.
        """
        if self.metric not in metrics:
            known = ", ".join(sorted(metrics))
            raise SettingError("metric", self.metric, f"one of {known}", "choose one of them")
        value = metrics[self.metric]
        better = not math.isnan(value) and (
            self.best is None or self._sign * (value - self.best) > self._min_delta
        )
        if better:
            self.best, self.since = value, 0
        else:
            self.since += 1
        return better

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save."""
        return {"best": self.best, "since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the saved state."""
        self.best, self.since = state["best"], state["since"]


class EarlyStopping(Callback):
    """Stop training when a validation metric has not improved for several evaluations.

    The state of this callback, and with ``restore`` the best weights, are stored in every
    checkpoint. A resumed run stops at the same update as an uninterrupted run; a run that early
    stopping has ended does not train further.

    Args:
        metric: name of a metric of the validation set: "loss", "accuracy". Default: "loss".
        mode: "min" if lower is better (the default), "max" if higher is better.
        patience: number of consecutive evaluations without improvement after which training stops.
            Default: 3.
        min_delta: smallest change that counts as an improvement. Default: 0.
        restore: whether to give the model, and the averaged weights, the weights of the best
            evaluation at the end. Costs the size of the weights in memory and in each checkpoint.
            The newest checkpoint still holds the state of the last update. Default: True.

    Raises:
        SettingError: a value is not valid.
    """

    def __init__(
        self,
        metric: str = "loss",
        *,
        mode: str = "min",
        patience: int = 3,
        min_delta: float = 0.0,
        restore: bool = True,
    ) -> None:
        self._waiting = PatienceCount(metric, mode, min_delta)
        self.metrics = (self._waiting.metric,)
        self._patience = at_least("patience", patience, 1)
        self._restore = restore
        self._best: dict[str, torch.Tensor] = {}
        self._trainer: Run | None = None
        self.best_step: int | None = None  # number of updates at the best evaluation

    @property
    def best(self) -> float | None:
        """The best value of the metric so far."""
        return self._waiting.best

    def started(self, trainer: Run) -> None:
        """Stop at once if early stopping has already ended this run."""
        self._trainer = trainer
        self._stop_if_due()

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        """Compare the metric with the best value, and stop if ``patience`` is used up."""
        assert self._trainer is not None
        if self._waiting.takes(metrics):
            self.best_step = global_step
            if self._restore:
                self._best = self._trainer.weights()
        self._stop_if_due()

    def stopped(self, reason: str) -> None:  # noqa: ARG002
        """Give the model the best weights. The last state was saved before."""
        if self._best and self._trainer is not None and self._waiting.since:
            self._trainer.take_weights(self._best)

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save."""
        return {**self._waiting.state_dict(), "best_step": self.best_step, "weights": self._best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the saved state."""
        self._waiting.load_state_dict(state)
        self.best_step, self._best = state["best_step"], state["weights"]

    def _stop_if_due(self) -> None:
        if self._waiting.since >= self._patience and self._trainer is not None:
            best = f"the best was {self._waiting.best:.4g} after step {self.best_step}"
            self._trainer.stop(
                f"{self._waiting.metric} did not improve for {self._waiting.since} evaluations: "
                f"{best}"
            )


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
