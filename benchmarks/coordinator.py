"""The coordinator in virtual time: what an event costs it, by the number of workers.

    python benchmarks/coordinator.py [--workers 1000,10000] [--steps 10] [--rule sync] [--json FILE]

Workers that only pretend take a second per shard, 5% more or less; one shard in a hundred is held
up for 4 more, and some workers are killed and come back (--failures). V is N. The first table has
processor time of such a run with what it takes to pretend, and the most memory that the process
had. The pretending is that of `quorate plan`.

For the second the events of each run are replayed to a new coordinator, which decides the same and
so needs no pretending: the sizes by turns (--rounds), medians, and the median of the ratios within
a round. --rounds 0 leaves it out.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import time
from pathlib import Path
from statistics import median
from typing import Any

from quorate.coordination.coordinator import Coordinator
from quorate.coordination.protocol import Effect, Event, Joined
from quorate.coordination.rules import parse
from quorate.simulation.virtual_run import VirtualRun, WorkerFailure

PER_HOST = 8  # workers


class Recorded(Coordinator):
    """A coordinator that notes what it is told."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.arguments = arguments
        self.told: list[tuple[Event, float]] = []

    def handle(self, event: Event, now: float, *, only_record: bool = False) -> list[Effect]:
        """Note an event, and take it."""
        self.told.append((event, now))
        return super().handle(event, now, only_record=only_record)


class History:
    """What a coordinator was told in a run. ``replay`` it."""

    def __init__(self, recorded: Recorded) -> None:
        self._arguments = {**recorded.arguments, "tally": None}
        self._told = recorded.told

    def replay(self) -> float:
        """Return the microseconds of a core that an event takes a new coordinator."""
        coordinator = Coordinator(**self._arguments)
        gc.collect()
        begun = time.thread_time()
        for event, now in self._told:
            coordinator.handle(event, now)
        return (time.thread_time() - begun) / len(self._told) * 1e6


def replayed(histories: dict[int, History], rounds: int) -> dict[str, Any]:
    """Replay each by turns, print what an event takes, and return it."""
    gc.freeze()  # the histories: the collector has only what a coordinator makes
    taken = [{n: history.replay() for n, history in histories.items()} for _ in range(rounds)]
    few, many = min(histories), max(histories)
    ratio = median(each[many] / each[few] for each in taken)
    print("\n| N = V | us per event, median | least |\n|---|---|---|")
    for n in histories:
        own = [each[n] for each in taken]
        print(f"| {n:,} | {median(own):.1f} | {min(own):.1f} |")
    print(f"\n{many:,} over {few:,} workers: {ratio:.2f} times per event ({rounds} rounds)")
    return {"rounds": taken, "ratio": ratio}


class Run:
    """A run in virtual time. ``play`` it.

    Args:
        workers: N, and V.
        steps: batches of V shards.
        rule: as a user names it.
        failures: workers that are killed, spread over the run, and are back 3 s later.
        is_recorded: have it keep its events, for ``history``.
    """

    def __init__(
        self, workers: int, steps: int, rule: str, failures: int, *, is_recorded: bool = False
    ) -> None:
        self.spent_s = 0.0  # of the processor
        self.join_s = 0.0  # of that, until all have joined
        chance = random.Random(workers)
        self.run = VirtualRun(
            places=[f"host-{worker // PER_HOST}" for worker in range(workers)],
            shards=workers,
            batches=steps,
            rule=parse(rule),
            most_open_per_worker=2,
            coordinator=Recorded if is_recorded else Coordinator,
            shard_s=lambda *_: chance.uniform(0.95, 1.05) + 4.0 * (chance.random() < 0.01),
            failures=[
                WorkerFailure(steps * (n + 0.5) / failures, chance.randrange(workers), crashed=True)
                for n in range(failures)
            ],
        )
        self._workers = workers

    def history(self) -> History:
        """Return what the coordinator was told."""
        coordinator = self.run.coordinator
        assert isinstance(coordinator, Recorded)
        return History(coordinator)

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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows, histories = [], dict[int, History]()
    print("| N = V | steps | events | copies | s, to join | s, in all | us per event | MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for workers in map(int, options.workers.split(",")):
        run = Run(
            *(workers, options.steps, options.rule, options.failures),
            is_recorded=options.rounds > 0,
        )
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
        if options.rounds:
            histories[workers] = run.history()
    found = replayed(histories, options.rounds) if histories else None
    if options.json is not None:
        options.json.write_text(json.dumps({"runs": rows, "replayed": found}, indent=2))


if __name__ == "__main__":
    main()
