"""The Collect class: metrics computed from the outputs of all rows at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quorate.errors import SettingError
from quorate.replica.outputs.rows import checked


@dataclass(frozen=True)
class Collect:
    """Collect outputs of all rows, and compute a metric from all of them.

    For metrics that are not means or counts: area under a curve, mean average precision, rank
    correlation, retrieval. With ``Trainer(totals={"auc": Collect(finish)})`` the loss function
    returns ``{"loss": ..., "auc": (scores, labels)}`` in evaluation mode.

    Args:
        finish: a function that is called once per evaluation with the outputs of the whole dataset,
            in the order of the rows: ``finish(scores, labels)`` if the loss function returns a
            tuple, otherwise with one argument. Returns a number, or a dict of numbers.

    Raises:
        SettingError: ``finish`` is not a function.
    """

    finish: Callable[..., Any]

    def __post_init__(self) -> None:
        finish: object = self.finish
        if not callable(finish):
            expected, fix = "a function of all rows", "as Collect(lambda scores, labels: ...)"
            raise SettingError("Collect", type(finish).__name__, expected, fix)

    def of(self, name: str, value: object, rows: int) -> Any:
        """Return the outputs of one shard, on the host.

        Raises:
            OutputError: the outputs have no row dimension.
        """
        return checked(value, rows, f"total {name!r}")

    def finished(self, value: Any) -> Any:
        """Return the result of ``finish`` for the outputs of all rows."""
        return self.finish(*value) if isinstance(value, tuple) else self.finish(value)
