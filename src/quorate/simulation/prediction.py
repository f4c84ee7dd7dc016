"""The result of a simulation, as plain numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

# What the time of a run goes into, as shares of it.
PARTS = (
    *("arithmetic", "cores", "uneven", "stragglers"),
    *("updates", "network", "checkpoints", "failures"),
)


@dataclass(frozen=True)
class Prediction:
    """The predicted speed, losses and cost of a run.

    "Running" figures are for a run without failures and checkpoints; all figures from
    ``examples_per_s`` on are averages over a long time.

    Attributes:
        update: the update rule.
        workers: number of workers N, without spares.
        spares: number of spares.
        shards: number of shards V of a batch.
        rows_per_update: mean number of rows in an update, without dropped rows.
        running_examples_per_s: running speed.
        step_s: running time from one update to the next, median.
        step_p99_s: running time from one update to the next, 99th percentile.
        efficiency: running speed, divided by the speed of one worker times the number of workers,
            including spares.
        dropped: share of the computed rows that are in no update.
        copies: share of the started shards that another worker computed too.
        staleness_mean: mean staleness, in updates.
        staleness_max: largest staleness, in updates.
        vectors: mean number of vectors of sums that reach the coordinator for an update.
        holders: mean number of workers that hold sums of an update.
        examples_per_s: speed over a long time, with failures and checkpoints.
        goodput: share of the running speed that is left over a long time.
        goodput_of_workers: goodput if only failures counted that do not restart the whole run.
        failures_per_day: failures of workers and hosts per day.
        run_mtbf_h: hours between failures that restart the whole run from a checkpoint.
        save_every_s: seconds between checkpoints, as given or the best interval.
        young_s: interval between checkpoints by Young's formula.
        daly_s: interval between checkpoints by Daly's formula.
        dollars_per_million: price of a million examples, in dollars.
        shares: share of the total time by cause, one entry for each of ``PARTS``.
    """

    update: str
    workers: int
    spares: int
    shards: int
    rows_per_update: float
    running_examples_per_s: float
    step_s: float
    step_p99_s: float
    efficiency: float
    dropped: float
    copies: float
    staleness_mean: float
    staleness_max: int
    vectors: float
    holders: float
    examples_per_s: float
    goodput: float
    goodput_of_workers: float
    failures_per_day: float
    run_mtbf_h: float
    save_every_s: float
    young_s: float
    daly_s: float
    dollars_per_million: float
    shares: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """Return a dict for JSON. Infinite numbers become None."""
        return {
            name: None if isinstance(value, float) and not isfinite(value) else value
            for name, value in asdict(self).items()
        }
