"""The wait for a better metric, shared by early stopping and the plateau callback."""

from __future__ import annotations

import math
from typing import Any

from quorate.errors import SettingError
from quorate.settings import integer

MODES = ("min", "max")


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


def at_least(name: str, value: int, least: int) -> int:
    """Return a whole number after checking its lower bound.

    Raises:
        SettingError: the value is no whole number, or too small.
    """
    return integer(name, value, least=least, fix=f"for example {name}={least}")
