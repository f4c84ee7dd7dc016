"""The coordinator alone, in virtual time: what an event costs it, by the number of workers.

    python benchmarks/coordinator.py [--workers 1000,10000] [--steps 10] [--rule sync] [--json FILE]

Workers that only pretend take a second per shard, 5% more or less; one shard in a hundred is held
up for 4 more, and some workers are killed and come back (--failures). V is N. What is measured is
processor time, with what it takes to pretend, and the most memory that the process had. The
pretending is that of `quorate plan`.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
from pathlib import Path

from quorate.coordination.protocol import Joined
from quorate.coordination.rules import parse
from quorate.simulation.virtual_run import Failure, VirtualRun

PER_HOST = 8  # workers


class Run:
    """A run in virtual time. ``play`` it.

    Args:
        workers: N, and V.
        steps: batches of V shards.
        rule: as a user names it.
        failures: workers that are killed, spread over the run, and are back 3 s later.
    """

    def __init__(self, workers: int, steps: int, rule: str, failures: int) -> None:
        self.spent_s = 0.0  # of the processor
        self.join_s = 0.0  # of that, until all have joined
        chance = random.Random(workers)
        self.run = VirtualRun(
            places=[f"host-{worker // PER_HOST}" for worker in range(workers)],
            shards=workers,
            batches=steps,
            rule=parse(rule),
            most_open_per_worker=2,
            shard_s=lambda *_: chance.uniform(0.95, 1.05) + 4.0 * (chance.random() < 0.01),
            failures=[
                Failure(steps * (n + 0.5) / failures, chance.randrange(workers), crashed=True)
                for n in range(failures)
            ],
        )
        self._workers = workers

    def play(self) -> None:
        """Play it to its end."""
        begun = time.process_time()
        joined = 0
        while joined < self._workers:
            joined += isinstance(self.run.advance(), Joined)
        self.join_s = time.process_time() - begun
        self.run.play()
        self.spent_s = time.process_time() - begun


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description="What an event costs the coordinator.")
    parser.add_argument("--workers", default="1000,10000")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rule", default="sync")
    parser.add_argument("--failures", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print("| N = V | steps | events | copies | s, to join | s, in all | us per event | MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for workers in map(int, options.workers.split(",")):
        run = Run(workers, options.steps, options.rule, options.failures)
        run.play()
        mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        row = {
            "workers": workers,
            "steps": options.steps,
            "events": run.run.events,
            "copies": run.run.copies,
            "join_s": run.join_s,
            "spent_s": run.spent_s,
            "us_per_event": run.spent_s / run.run.events * 1e6,
            "mib": mib,
        }
        rows.append(row)
        print(
            f"| {workers:,} | {options.steps} | {run.run.events:,} | {run.run.copies:,} "
            f"| {run.join_s:.2f} | {run.spent_s:.2f} | {row['us_per_event']:.1f} | {mib:.0f} |",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
