"""The coordinator alone, in virtual time: what an event costs it, by the number of workers.

    python benchmarks/coordinator.py [--workers 1000,10000] [--steps 10] [--rule sync] [--json FILE]

Workers that only pretend take a second per shard, 5% more or less; one shard in a hundred is held
up for 4 more, and some workers are killed and come back (--failures). V is N. What is measured is
processor time, with what it takes to pretend, and the most memory that the process had.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import resource
import time
from collections import deque
from pathlib import Path

from quorate.coordination.coordinator import Coordinator
from quorate.coordination.plan import Plan, PlanByShard
from quorate.coordination.protocol import (
    Applied,
    Apply,
    Cancel,
    Cancelled,
    Compute,
    Done,
    Effect,
    Event,
    Finish,
    Joined,
    Left,
    Tick,
    Wake,
)
from quorate.coordination.rules import parse

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
        self.events = 0
        self.copies = 0
        self.spent_s = 0.0  # of the processor
        self.now = 0.0
        self.join_s = 0.0  # of that, until all have joined
        made = parse(rule)
        kind = PlanByShard if made.by_shard else Plan
        plan = kind(rows=workers * steps, batch_size=workers, shards=workers, shuffle=False)
        self._coordinator = Coordinator(
            shards_of=plan.shards_of,
            home_shards=plan.home_shards,
            next_home=plan.next_home,
            lookahead=plan.lookahead,
            first_step=0,
            last_step=plan.steps_per_epoch,
            rule=made,
            most_open=2 * workers,
            timeout_s=300.0,
        )
        self._chance = random.Random(workers)
        self._queue: list[tuple[float, int, Event, int]] = []
        self._posted = 0
        self._lives = [0] * workers
        self._is_finished = False
        for worker in range(workers):
            self._post(0.0, Joined(worker, f"host-{worker // PER_HOST}"), worker)
        for number in range(failures):
            at, worker = steps * (number + 0.5) / failures, self._chance.randrange(workers)
            self._post(at, Left(worker, "killed", crashed=True), worker)

    def _post(self, at: float, event: Event, worker: int = -1) -> None:
        self._posted += 1
        life = self._lives[worker] if worker >= 0 else 0
        heapq.heappush(self._queue, (at, self._posted, event, life))

    def play(self) -> None:
        """Play it to its end."""
        wake_at, begun = None, time.process_time()
        joined = 0
        while not self._is_finished:
            if wake_at is not None and wake_at < self._queue[0][0]:
                self.now, event, wake_at = wake_at, Tick(), None
            else:
                self.now, _, event, life = heapq.heappop(self._queue)
                worker = getattr(event, "worker", -1)
                if worker >= 0 and life != self._lives[worker]:
                    continue  # of a worker that has left meanwhile
                if isinstance(event, Left):
                    self._lives[worker] += 1
                    self._post(self.now + 3.0, Joined(worker, f"host-{worker // PER_HOST}"), worker)
            effects = deque(self._coordinator.handle(event, self.now))
            self.events += 1
            if isinstance(event, Joined):
                joined += 1
                if joined == len(self._lives):
                    self.join_s = time.process_time() - begun
            wake_at = None
            while effects:
                effect = effects.popleft()
                if isinstance(effect, Wake):
                    wake_at = effect.at
                elif isinstance(effect, Apply):
                    effects.extend(self._coordinator.handle(Applied(effect.step), self.now))
                    self.events += 1
                else:
                    self._carry_out(effect)
        self.spent_s = time.process_time() - begun

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Compute):
            takes_s = self._chance.uniform(0.95, 1.05) + 4.0 * (self._chance.random() < 0.01)
            self.copies += effect.instead_of is not None
            done = Done(effect.worker, effect.step, effect.shard)
            self._post(self.now + takes_s, done, effect.worker)
        elif isinstance(effect, Cancel):
            self._lives[effect.worker] += 1  # its answer does not come
            left_off = Cancelled(effect.worker, effect.step, effect.shard)
            self._post(self.now + 0.01, left_off, effect.worker)
        elif isinstance(effect, Finish):
            self._is_finished = True


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
            "events": run.events,
            "copies": run.copies,
            "join_s": run.join_s,
            "spent_s": run.spent_s,
            "us_per_event": run.spent_s / run.events * 1e6,
            "mib": mib,
        }
        rows.append(row)
        print(
            f"| {workers:,} | {options.steps} | {run.events:,} | {run.copies:,} | {run.join_s:.2f} "
            f"| {run.spent_s:.2f} | {row['us_per_event']:.1f} | {mib:.0f} |",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
