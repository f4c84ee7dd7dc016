"""Predictions: what came of a simulation, as plain numbers."""

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
    """What a run of some size would do."""

    # What was simulated.
    update: str  # the rule
    workers: int  # N, without spares
    spares: int
    shards: int  # V of a batch
    rows_per_update: float  # mean, without those that are dropped
    # While nothing fails and nothing is saved.
    running_examples_per_s: float
    step_s: float  # from one update to the next: median
    step_p99_s: float
    efficiency: float  # over one worker alone, times all workers, spares among them
    dropped: float  # share of the rows that were computed in time for another update, or for none
    copies: float  # share of the shards that were begun which another worker had too
    staleness_mean: float  # updates
    staleness_max: int
    vectors: float  # of sums that reach the coordinator for an update, mean
    holders: float  # workers that have some, mean
    # Over a long time.
    examples_per_s: float
    goodput: float  # share of what is computed above that stays: work kept over work that could be
    goodput_of_workers: float  # of it, what failures leave after which the run goes on
    failures_per_day: float  # of workers and hosts
    run_mtbf_h: float  # between failures from which the run has to begin at a checkpoint
    save_every_s: float  # between checkpoints: as asked for, or the best
    young_s: float  # what Young's rule says it should be
    daly_s: float  # and what Daly's
    dollars_per_million: float  # examples
    shares: dict[str, float]  # of ``PARTS``: what all the time goes into

    def to_json(self) -> dict[str, Any]:
        """Return an object for JSON, which has no infinite numbers: null in their place."""
        return {
            name: None if isinstance(value, float) and not isfinite(value) else value
            for name, value in asdict(self).items()
        }
