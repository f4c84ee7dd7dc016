"""The table of a plan, and the lines below it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from quorate.commands.plan.advice import best_spares, bound, saving
from quorate.machine.text import table as table_of
from quorate.machine.text import three_digits
from quorate.services.display.shard_time import duration
from quorate.simulation.inputs import Network, ShardTimes, Stragglers
from quorate.simulation.prediction import Prediction

HEADS = (
    *("workers", "spares", "update", "examples/s", "step", "p99", "efficiency", "goodput"),
    *("dropped", "stale", "$/M examples"),
)
RIGHT = [column for column, head in enumerate(HEADS) if head != "update"]


def cells(told: Prediction) -> tuple[str, ...]:
    """Return a row of the table."""
    cost = told.dollars_per_million
    return (
        f"{told.workers:,}",
        f"{told.spares:,}",
        told.update,
        three_digits(told.examples_per_s),
        duration(told.step_s),
        duration(told.step_p99_s),
        f"{told.efficiency:.1%}",
        f"{told.goodput:.1%}",
        f"{told.dropped:.1%}",
        f"{told.staleness_mean:,.0f}"
        if told.staleness_mean >= 100
        else f"{told.staleness_mean:.1f}",
        three_digits(cost) if cost else "",
    )


def table(rows: Sequence[Prediction]) -> str:
    """Return a row per prediction; without prices, no column of costs."""
    return table_of(HEADS, [*map(cells, rows)], right=RIGHT)


def below(
    rows: Sequence[Prediction], times: ShardTimes, stragglers: Stragglers, network: Network
) -> list[str]:
    """Return the bottleneck, a remedy and the save interval for each number of workers and rule.

    Args:
        rows: the predictions, grouped by number of workers and rule.
    """
    lines = []
    for (workers, rule), group in groupby(rows, key=_family):
        listed = list(group)
        label = f"{workers:,} worker{'s' if workers > 1 else ''}, {rule}"
        first = listed[0]
        what, helps = bound(first, times, stragglers, network)
        lines.append(f"{label}: {what}; what helps: {helps}")
        best = best_spares(listed)
        if len(listed) > 1:
            gain = (best.examples_per_s / (best.workers + best.spares)) / (
                first.examples_per_s / (first.workers + first.spares)
            ) - 1
            many = f"{best.spares} spare{'s' if best.spares != 1 else ''}"
            lines.append(
                f"  {many} give{'s' if best.spares == 1 else ''} most per worker that is paid for"
                f": {gain:+.1%} over {first.spares}"
                if gain > 0
                else f"  spares do not pay: {first.spares} give most per worker that is paid for"
            )
        if first.vectors < first.holders:
            lines.append(
                f"  hosts add up what their workers have: {first.vectors:,.0f} vectors of sums "
                f"per update in the place of {first.holders:,.0f}"
            )
        lines.append(f"  {saving(best)}")
    return lines


def _family(told: Prediction) -> tuple[int, str]:
    return told.workers, told.update
