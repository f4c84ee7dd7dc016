"""Results of an evaluation collected beside sums: outputs by row, and states of metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quorate.coordination.plan import Plan
from quorate.errors import OutputError
from quorate.replica.outputs.collect import Collect
from quorate.replica.outputs.metric import UserMetric
from quorate.replica.outputs.rows import Piece
from quorate.replica.totals import numbers
from quorate.training.predicting.columns import Sink, in_memory


class Gathered:
    """The results collected by an evaluation.

    Args:
        kept: collecting objects by name.
        plan: plan of the evaluation.
    """

    def __init__(self, kept: Mapping[str, Collect | UserMetric], plan: Plan) -> None:
        self._kept, self._plan = kept, plan
        self._names: list[str] | None = None  # names in the shards' outputs
        self._sinks: dict[str, Sink] = {}
        self._states: dict[str, dict[str, Any]] = {}

    def put(self, outputs: Sequence[Piece]) -> None:
        """Add the outputs of the shards of the next step.

        Raises:
            OutputError: shards return outputs of different names.
        """
        for step, shard, values in sorted(outputs, key=lambda piece: piece[:2]):
            if self._names is None:
                self._names = list(values)
            if list(values) != self._names:
                raise OutputError(
                    "totals",
                    got=f"{sorted(self._names)} from one shard and {sorted(values)} from another",
                    expected="the same names from every shard",
                    fix="return each total for every shard",
                )
            for name, value in values.items():
                if isinstance(kept := self._kept[name], Collect):
                    if name not in self._sinks:
                        self._sinks[name] = in_memory(self._plan.rows)
                    self._sinks[name].put(value, len(self._plan.shard(step, shard)))
                else:
                    self._states[name] = kept.merged(self._states.get(name), value)

    def finished(self) -> dict[str, float]:
        """Return the numbers computed from the collected results, by name.

        Raises:
            LossError: a function returned something else than numbers.
            Exception: an error of a function or a metric, with a note that names the total.
        """
        found: dict[str, float] = {}
        for name in self._names or ():
            kept = self._kept[name]
            try:
                if isinstance(kept, Collect):
                    returned = kept.finished(self._sinks[name].finish({}))
                else:
                    returned = kept.finished(self._states[name])
            except Exception as error:
                error.add_note(f"quorate: in totals[{name!r}], of {self._plan.rows:,} rows")
                raise
            found |= numbers(name, returned, found)
        return found
