"""Where the time of an update goes, in microseconds, on one worker of this process.

    python benchmarks/phases.py [--shards 8] [--updates 500]

The perceptron of overhead.py. Functions of the package are timed from outside, each with all that
it calls; indented are those that are called by the one above. To time one costs about 1 us, which
the totals have too: overhead.py has them without.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from typing import Any

import overhead
import torch

from quorate.coordination.coordinator import Coordinator
from quorate.data.feed import Feed
from quorate.engines.job import Job
from quorate.engines.job_channel import StepSums
from quorate.engines.local.towers import TowersChannel
from quorate.engines.shard_runner import ShardRunner
from quorate.replica.flat import Flat
from quorate.replica.quick import torch_calls
from quorate.replica.replica import Replica
from quorate.replica.witness.witness import Witness
from quorate.training.model_edits import ModelEdits
from quorate.training.optimizing.update import Update

# (depth, label, owner, name)
TIMED: list[tuple[int, str, Any, str]] = [
    (0, "the shards of a run, and the frame around them", TowersChannel, "receive"),
    (1, "computing the dealt shards", ShardRunner, "run"),
    (2, "rows", Feed, "take_run"),
    (2, "a shard", Job, "_computed"),
    (3, "forward, backward and their frame", Replica, "_run"),
    (4, "a shard's beginning", Replica, "_begin"),
    (4, "the loss function, and reading the loss", Replica, "_read"),
    (5, "the loss function", overhead, "loss"),
    (4, "backward", torch_calls, "derive"),
    (3, "the gradient into its vector", Flat, "fill"),
    (3, "the look for forbidden writes", Witness, "end"),
    (0, "the coordinator", Coordinator, "handle"),
    (0, "sums of shards", StepSums, "add_kept"),
    (0, "the update", Update, "apply"),
    (0, "the look for changes of the model by user code", ModelEdits, "detect"),
]


def timed(label: str, owner: Any, name: str, seconds: Counter[str], calls: Counter[str]) -> None:
    """Time a function from now on."""
    function = getattr(owner, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[label] += time.perf_counter() - begun
            calls[label] += 1

    setattr(owner, name, run)


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--updates", type=int, default=500)
    told = parser.parse_args()
    torch.set_num_threads(1)
    seconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for _, label, owner, name in TIMED:
        timed(label, owner, name, seconds, calls)

    def us(updates: Any) -> float:
        for _ in range(told.updates):  # warms up
            next(updates)
        seconds.clear()
        calls.clear()
        begun = time.perf_counter()
        for _ in range(told.updates):
            next(updates)
        return (time.perf_counter() - begun) / told.updates * 1e6

    total = us(overhead.ours(told.shards, 1, "towers"))
    print("| | us per update | calls | us per call |\n|---|---|---|---|")
    print(f"| an update of {told.shards} shards | {total:.0f} | 1 | {total:.0f} |")
    for depth, label, _, _ in TIMED:
        spent, often = seconds[label] * 1e6 / told.updates, calls[label] / told.updates
        each = spent / often if often else 0.0
        print(f"| {'&emsp;' * (1 + depth)}{label} | {spent:.0f} | {often:.1f} | {each:.0f} |")
    by_hand = us(overhead.by_hand(told.shards))
    print(f"| the plain loop | {by_hand:.0f} | 1 | {by_hand:.0f} |")


if __name__ == "__main__":
    main()
