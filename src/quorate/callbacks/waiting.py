"""Waiting for a metric to get better: what early stopping and a plateau have in common."""

from __future__ import annotations

import math
from typing import Any

from quorate.errors import SettingError

MODES = ("min", "max")


class Waiting:
    """How many evaluations it is since a metric was the best.

    Args:
        metric: of the validation set, by its name there.
        mode: "min" if less is better, "max" if more is.
        min_delta: by how much it has to be better.

    Raises:
        SettingError: a value cannot work.
    """

    def __init__(self, metric: str, mode: str, min_delta: float) -> None:
        if mode not in MODES:
            raise SettingError("mode", mode, "min or max", "for example mode='max'")
        if not min_delta >= 0 or math.isinf(min_delta):
            raise SettingError("min_delta", min_delta, "a number >= 0", "leave it out")
        self.metric = metric.removeprefix("validation/")
        self._sign = 1.0 if mode == "max" else -1.0
        self._min_delta = min_delta
        self.best: float | None = None
        self.since = 0  # evaluations since then

    def takes(self, metrics: dict[str, float]) -> bool:
        """Count an evaluation, and return whether it is the best so far; NaN never is.

        Raises:
            SettingError: there is no such metric.
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
        """Return what to save."""
        return {"best": self.best, "since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what was saved."""
        self.best, self.since = state["best"], state["since"]


def at_least(name: str, value: int, least: int) -> int:
    """Return a whole number.

    Raises:
        SettingError: it is none, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingError(name, value, f"a whole number >= {least}", f"for example {name}={least}")
    return value
