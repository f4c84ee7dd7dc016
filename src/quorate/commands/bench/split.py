"""The split: the parts of the time of a step.

A worker's time is fetching, computing, handing over, and waiting. While all workers wait, the
coordinator sums gradients and makes the update; the rest of the waiting is for slower workers.
"""

from __future__ import annotations

from statistics import fmean, median_low

from quorate.commands.bench.measured import Measured

# In the order of a step.
PARTS = ("input", "compute", "exchange", "update", "waiting", "other")

Split = dict[str, float]


def split(run: Measured) -> Split:
    """Return the share of each of ``PARTS`` in the time of a step; the sum is 1.

    input     waiting for rows
    compute   forward and backward
    exchange  handing gradients over, summing them, publishing parameters
    update    division, clipping, optimizer, average
    waiting   for slower workers, and for messages
    other     the loop between two updates: callbacks, logs, the loop's body

    Means over workers. If updates are made while workers compute, the coordinator's time counts
    only up to the workers' waiting time.
    """
    whole = run.seconds
    mean = {
        phase: fmean(worker.seconds[phase] for worker in run.workers)
        for phase in ("fetching", "forward", "backward", "pushing")
    }
    waited = max(0.0, whole - sum(mean.values()))
    coordinator = {
        "compute": run.device_s,
        "exchange": run.exchange_s,
        "update": run.update_s,
        "other": run.beside_s,
    }
    busy = sum(coordinator.values())
    if busy > waited:
        coordinator = {part: s * waited / busy for part, s in coordinator.items()}
    seconds = {
        "input": mean["fetching"],
        "compute": mean["forward"] + mean["backward"] + coordinator["compute"],
        "exchange": mean["pushing"] + coordinator["exchange"],
        "update": coordinator["update"],
        "waiting": max(0.0, waited - busy),
        "other": coordinator["other"],
    }
    total = sum(seconds.values())  # the whole, except for differences between clocks
    return {part: seconds[part] / total for part in PARTS}


def compute_s(run: Measured) -> float:
    """Return the seconds of forward and backward per shard, of the median worker, or 0."""
    seconds = [
        (worker.seconds["forward"] + worker.seconds["backward"]) / worker.shards
        for worker in run.workers
        if worker.shards
    ]
    return median_low(seconds) if seconds else 0.0
