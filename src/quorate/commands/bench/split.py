"""The split: what the time of a step goes into.

A worker's time is fetching, computing, handing over, and waiting. While all workers wait, the
coordinator adds gradients up and makes the update; what is left of their waiting is for each other.
"""

from __future__ import annotations

from statistics import fmean, median_low

from quorate.commands.bench.measured import Measured

# In the order of a step.
PARTS = ("input", "compute", "exchange", "update", "waiting", "other")

Split = dict[str, float]


def split(run: Measured) -> Split:
    """Return the share of each of ``PARTS`` in the time of a step; they add up to 1.

    input     waiting for rows
    compute   forward and backward
    exchange  handing gradients over, adding them up, handing parameters back
    update    division, clipping, optimizer, average
    waiting   for other workers, and for messages
    other     what the loop does between two updates: callbacks, logs, its own body

    Means over workers. Where updates are made while workers compute, only so much of the
    coordinator's time counts as they wait for.
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
    total = sum(seconds.values())  # that is the whole, but for clocks that are read one by one
    return {part: seconds[part] / total for part in PARTS}


def compute_s(run: Measured) -> float:
    """Return the seconds of forward and backward per shard, of the worker in the middle, or 0."""
    seconds = [
        (worker.seconds["forward"] + worker.seconds["backward"]) / worker.shards
        for worker in run.workers
        if worker.shards
    ]
    return median_low(seconds) if seconds else 0.0
