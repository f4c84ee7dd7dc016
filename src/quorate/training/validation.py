"""When the validation set is evaluated, and which checkpoint is the best by a metric of it."""

from __future__ import annotations

import math
from typing import Any

from quorate.errors import SettingError

DIRECTIONS = ("min", "max")


class Best:
    """A named metric, and whether more of it is better.

    Args:
        text: ``min:loss``, ``max:accuracy``.

    Raises:
        SettingError: it is something else.
    """

    def __init__(self, text: str) -> None:
        direction, colon, self.name = str(text).partition(":")
        if direction not in DIRECTIONS or not colon or not self.name:
            raise SettingError(
                "best", text, "min:NAME or max:NAME of a metric", "for example best='max:accuracy'"
            )
        self._sign = 1.0 if direction == "max" else -1.0

    def entry(self, metrics: dict[str, float], global_step: int) -> dict[str, Any]:
        """What is noted of a best one."""
        return {"metric": self.name, "value": metrics[self.name], "global_step": global_step}

    def is_better(self, metrics: dict[str, float], best: dict[str, Any] | None) -> bool:
        """Than the ``entry`` of the best so far; a value that is no number never is.

        Raises:
            SettingError: there is no metric of this name.
        """
        if self.name not in metrics:
            known = ", ".join(sorted(metrics))
            raise SettingError("best", self.name, f"one of {known}", "the loss function names them")
        value = metrics[self.name]
        if best is None or best["metric"] != self.name:
            return not math.isnan(value)
        better: bool = self._sign * value > self._sign * best["value"]
        return better


class Evaluations:
    """When to evaluate, by the number of updates.

    Args:
        steps_per_epoch: updates.
        epochs: after every so many, and at the end of the run.
        steps: or after every so many updates.
    """

    def __init__(self, steps_per_epoch: int, epochs: int, steps: int | None) -> None:
        self._every = epochs * steps_per_epoch if steps is None else steps

    def are_due(self, global_step: int, last_step: int) -> bool:
        """Whether this is a step to evaluate after."""
        return global_step > 0 and (global_step % self._every == 0 or global_step == last_step)
