"""Collected outputs: what is no mean and no count, made of all rows at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quorate.errors import SettingError
from quorate.replica.outputs.rows import checked


@dataclass(frozen=True)
class Collect:
    """Have what the loss function returns for each row collected, and one function called with all.

    For area under a curve, mean average precision, a rank correlation, retrieval: what has to see
    every row. In ``Trainer(totals={"auc": Collect(finish)})`` the loss function returns
    ``{"loss": ..., "auc": (scores, labels)}`` in evaluation mode.

    Args:
        finish: called once per evaluation with the rows of the whole dataset in their order, as
            ``finish(scores, labels)`` for a tuple, else with one argument. It returns a number, or
            several by names.

    Raises:
        SettingError: it is no function.
    """

    finish: Callable[..., Any]

    def __post_init__(self) -> None:
        finish: object = self.finish
        if not callable(finish):
            expected, fix = "a function of all rows", "as Collect(lambda scores, labels: ...)"
            raise SettingError("Collect", type(finish).__name__, expected, fix)

    def of(self, name: str, value: object, rows: int) -> Any:
        """Return what is kept of one shard, on the host.

        Raises:
            OutputError: it is not by row.
        """
        return checked(value, rows, f"total {name!r}")

    def finished(self, value: Any) -> Any:
        """Return what the function makes of all rows."""
        return self.finish(*value) if isinstance(value, tuple) else self.finish(value)
