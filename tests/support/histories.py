"""Random histories of runs: the only generator of orders of events.

A history is a rule, workers of several speeds, steps and shards, and all disturbances: stragglers,
kills with and without the results of the worker, late joins, failures, slow updates; a rough
history has a timeout too, workers that hang, and crashes. ``History.simulation`` plays the history,
from the beginning or from a position reached by an earlier part.
"""

import math
import random
from collections.abc import Iterable
from typing import Any

from support.simulator import Simulation

from quorate.coordination.plan import PlanByShard
from quorate.coordination.protocol import Joined, Left
from quorate.coordination.rules import Async, Bounded, Quorum, Rule, Sync
from quorate.coordination.tally import Tally

KINDS = ("sync", "quorum", "async", "bounded")

STEPS = 6  # at most, of rules with whole steps


class History:
    """A history that follows from its seed; chances are drawn once, so a history is played once.

    Args:
        kind: a name in ``KINDS``.
        seed: the number of the history.
        most: workers, and shards of a step.
    """

    def __init__(self, kind: str, seed: int, *, most: int = 12) -> None:
        self.chance = chance = random.Random(f"{kind} {most} {seed}")
        self._most = most
        few = chance.random() < 0.67
        self.workers = workers = chance.randint(1, 6) if few else chance.randint(7, most)
        rough = chance.random() < 0.5
        speeds = [chance.choice([1.0, 1.0, 2.5, 6.0]) for _ in range(workers)]
        stragglers = chance.choice([0.0, 0.1, 0.3])
        failures = chance.choice([0.0, 0.0, 0.0, 0.1, 0.3])
        hangs = chance.choice([0.0, 0.05, 0.2]) if rough else 0.0
        self._results_stay = chance.choice([0.0, 0.5, 1.0])
        self._crashes = chance.choice([0.0, 0.5]) if rough else 0.0
        # Whole seconds: many events at the same time. Other gaps: no two at a time.
        self._gaps = [
            chance.choice([float(chance.randint(0, 12)), chance.uniform(0.1, 12.0)])
            for _ in range(workers)
        ]
        self._has_new_numbers = chance.random() < 0.5
        self._places = chance.choice([[""], [""], ["", "a"], ["b", "a", "b", ""]])

        def time_s(worker: int, step: int, shard: int) -> float:
            if chance.random() < hangs:
                return math.inf
            if chance.random() < stragglers:
                return chance.choice([5.0, 20.0, 100.0])
            return speeds[worker % workers] * chance.choice([1.0, 1.0, chance.uniform(0.5, 1.5)])

        self._arguments: dict[str, Any] = {
            "time_s": time_s,
            "fails": lambda worker, step, shard: chance.random() < failures,
            "leaves_off_s": chance.choice([0.0, 0.5, 3.0, math.inf]),
            "apply_s": chance.choice([0.0, 0.0, 0.5, 3.0]),
            "patience": chance.choice([1.0, 1.5, 3.0]),
            "attempts": chance.choice([1, 2, 3, 9]) if failures else chance.randint(2, 9),
            "timeout_s": chance.choice([4.0, 10.0, 30.0]) if rough else None,
            "end_s": chance.choice([0.0, 0.5, 3.0]),
            "start_s": chance.choice([0.0, 1.0, 7.5]),
            "results_stay": chance.random() < 0.5,
            "run_s": chance.choice([0.0, 2.0, 6.0]),
        }
        self.rule, self.steps = self._draw_rule(kind)

    def _draw_rule(self, kind: str) -> tuple[Rule, int]:
        chance, most = self.chance, self._most
        shards = chance.randint(1, most)
        if kind in ("sync", "quorum"):
            per_step = [chance.choice([shards, chance.randint(1, most)]) for _ in range(STEPS)]
            self._arguments["shards"] = per_step.__getitem__
            rule = Sync() if kind == "sync" else Quorum(chance.randint(1, shards + 1))
            return rule, chance.randint(0, STEPS)
        batch_size = chance.randint(shards, most + 8)
        plan = PlanByShard(rows=chance.randint(1, 60), batch_size=batch_size, shards=shards)
        self._arguments |= {
            "shards": plan.shards_of,
            "home_shards": plan.home_shards,
            "lookahead": plan.lookahead,
            "most_open": chance.choice([math.inf, self.workers, 2 * self.workers]),
        }
        staleness = chance.choice([chance.randint(0, 6), chance.randint(7, 60)])
        return Async() if kind == "async" else Bounded(staleness), chance.randint(0, 60)

    def simulation(
        self, *, first_step: int = 0, left_open: Iterable[int] = (), tally: Tally | None = None
    ) -> Simulation:
        """Return the run from a position on, with all disturbances."""
        run = Simulation(
            steps=self.steps,
            rule=self.rule,
            first_step=first_step,
            left_open=left_open,
            tally=tally,
            **self._arguments,
        )
        chance = self.chance
        for number, gap in enumerate(self._gaps):
            worker, now = number, gap if number else 0.0
            place = self._places[number % len(self._places)]
            run.at(now, Joined(worker, place))
            for _ in range(chance.randint(0, 3)):
                now += chance.choice(self._gaps) + chance.choice([0.0, 0.25, 1.0])
                crashed = chance.random() < self._crashes
                stays = chance.random() < self._results_stay
                run.at(now, Left(worker, "killed", crashed=crashed, results_stay=stays))
                if number > 0 and chance.random() < 0.5:
                    break  # for good, but the first worker comes back
                now += chance.choice(self._gaps)
                worker += self.workers if self._has_new_numbers else 0
                run.at(now, Joined(worker, place))
        return run
