"""A table of intersection over union: after each evaluation, a line for each class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from legend import Legend

import quorate


def table(
    found: Mapping[str, float], legend: Legend, tested: int, before: Mapping[str, float] | None
) -> str:
    """Metrics as lines: a class each, and the mean; "-" for a class that is nowhere.

    Args:
        found: as ``loss.iou`` gives it.
        legend: of the classes.
        tested: of how many sizes there are columns of their own.
        before: likewise, with which it is compared in the last column; None: there is none.
    """
    suffixes = {"IoU": ""}
    if tested > 1:
        suffixes |= {f"1/{2**k}" if k else "full": f"_{k}" for k in range(tested)}
    titles = [*legend.names, "mean"]
    width = max(map(len, titles))
    lines = [f"{'':<{width}}" + "".join(f"{title:>8}" for title in suffixes)]
    if before is not None:
        lines[0] += "  change"
    for title, name in zip(titles, (*legend.metrics, "mean"), strict=True):
        values = [found[f"{name}_iou{suffix}"] for suffix in suffixes.values()]
        line = f"{title:<{width}}" + "".join(map(_figure, values))
        if before is not None:
            line += _figure(values[0] - before.get(f"{name}_iou", math.nan), "+")
        lines.append(line)
    return "\n".join(lines)


def _figure(value: float, sign: str = "-") -> str:
    return f"{'-':>8}" if math.isnan(value) else f"{value:>{sign}8.3f}"


class Table(quorate.Callback):
    """Prints the table after each evaluation, compared with the one before.

    Args:
        legend: of the classes.
        tested: see ``table``.
    """

    def __init__(self, legend: Legend, tested: int) -> None:
        self._legend = legend
        self._tested = tested
        self._before: dict[str, float] | None = None

    def started(self, trainer: Any) -> None:
        """Here and not in ``main``, as workers run that too."""
        if trainer.run_dir is not None:
            self._legend.save(trainer.run_dir)

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        """See the class."""
        print(f"IoU after {global_step:,} updates")
        print(table(metrics, self._legend, self._tested, self._before), flush=True)
        self._before = dict(metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return what a run that is resumed compares with."""
        return {"before": self._before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compare with the evaluation before the resume."""
        self._before = state["before"]
