"""Random histories of runs: the one generator of orders in which things may happen.

A history is a rule, workers of several speeds, steps and shards, and all that disturbs them:
stragglers, kills with and without what the worker held, late joins, failures, slow updates; a rough
one has a timeout too, workers that hang, and crashes. ``History.simulation`` plays it, from its
beginning or from a position that an earlier part of it had reached.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from support.simulator import Simulation

from quorate.coordination.coordinator import Coordinator
from quorate.coordination.plan import PlanByShard
from quorate.coordination.protocol import Joined, Left
from quorate.coordination.rules import Async, Bounded, Quorum, Rule, Sync
from quorate.coordination.tally import Tally

KINDS = ("sync", "quorum", "async", "bounded")

STEPS = 6  # at most, of rules that apply whole steps


def fixed(examples: int = 100) -> Callable[[Any], Any]:
    """Return settings: the same examples in every run, so that a failure is the change's."""
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None)


class History:
    """One of them. Chances are drawn as it is played, so it cannot be played twice."""

    def __init__(self, draw: st.DrawFn, kind: str, *, rough: bool, most: int = 12) -> None:
        few, many = st.integers(1, 6), st.integers(7, most)
        self._most = most
        self.workers = workers = draw(few | few | many)
        self.chance = chance = random.Random(draw(st.integers(0, 1_000_000)))
        speeds = draw(
            st.lists(st.sampled_from([1.0, 1.0, 2.5, 6.0]), min_size=workers, max_size=workers)
        )
        stragglers = draw(st.sampled_from([0.0, 0.1, 0.3]))
        failures = draw(st.sampled_from([0.0, 0.0, 0.0, 0.1, 0.3]))
        hangs = draw(st.sampled_from([0.0, 0.05, 0.2])) if rough else 0.0
        self._results_stay = draw(st.sampled_from([0.0, 0.5, 1.0]))
        self._crashes = draw(st.sampled_from([0.0, 0.5])) if rough else 0.0
        self._gaps = [
            draw(st.one_of(st.integers(0, 12).map(float), st.floats(0.1, 12.0)))
            for _ in range(workers)
        ]
        self._has_new_numbers = draw(st.booleans())

        def time_s(worker: int, step: int, shard: int) -> float:
            if chance.random() < hangs:
                return math.inf
            if chance.random() < stragglers:
                return chance.choice([5.0, 20.0, 100.0])
            # Whole seconds: many things happen at one time. Others: nothing does.
            return speeds[worker % workers] * chance.choice([1.0, 1.0, chance.uniform(0.5, 1.5)])

        self._arguments: dict[str, Any] = {
            "time_s": time_s,
            "fails": lambda worker, step, shard: chance.random() < failures,
            "leaves_off_s": draw(st.sampled_from([0.0, 0.5, 3.0, math.inf])),
            "apply_s": draw(st.sampled_from([0.0, 0.0, 0.5, 3.0])),
            "patience": draw(st.sampled_from([1.0, 1.5, 3.0])),
            "attempts": draw(st.sampled_from([1, 2, 3, 9]))
            if failures
            else draw(st.integers(2, 9)),
            "timeout_s": draw(st.sampled_from([4.0, 10.0, 30.0])) if rough else None,
            "end_s": draw(st.sampled_from([0.0, 0.5, 3.0])),
            "start_s": draw(st.sampled_from([0.0, 1.0, 7.5])),
            "results_stay": draw(st.booleans()),
            "run_s": draw(st.sampled_from([0.0, 2.0, 6.0])),
        }
        self.rule, self.steps = self._draw_rule(draw, kind)

    def _draw_rule(self, draw: st.DrawFn, kind: str) -> tuple[Rule, int]:
        shards = draw(st.integers(1, self._most))
        if kind in ("sync", "quorum"):
            some = st.integers(1, self._most) | st.just(shards)
            per_step = draw(st.lists(some, min_size=STEPS, max_size=STEPS))
            self._arguments["shards"] = per_step.__getitem__
            rule = Sync() if kind == "sync" else Quorum(draw(st.integers(1, shards + 1)))
            return rule, draw(st.integers(0, STEPS))
        batch_size = draw(st.integers(shards, self._most + 8))
        plan = PlanByShard(rows=draw(st.integers(1, 60)), batch_size=batch_size, shards=shards)
        self._arguments |= {
            "shards": plan.shards_of,
            "home_shards": plan.home_shards,
            "lookahead": plan.lookahead,
            "most_open": draw(st.sampled_from([math.inf, self.workers, 2 * self.workers])),
        }
        rule = Async() if kind == "async" else Bounded(draw(st.integers(0, 6)))
        return rule, draw(st.integers(0, 25))

    def simulation(
        self,
        *,
        first_step: int = 0,
        left_open: Iterable[int] = (),
        tally: Tally | None = None,
        coordinator: Callable[..., Coordinator] = Coordinator,
    ) -> Simulation:
        """Return the run from a position on, with all that disturbs it.

        Args:
            coordinator: makes the one that decides.
        """
        run = Simulation(
            steps=self.steps,
            rule=self.rule,
            first_step=first_step,
            left_open=left_open,
            tally=tally,
            coordinator=coordinator,
            **self._arguments,
        )
        chance = self.chance
        for number, gap in enumerate(self._gaps):
            worker, now = number, gap if number else 0.0
            run.at(now, Joined(worker))
            for _ in range(chance.randint(0, 3)):
                now += chance.choice(self._gaps) + chance.choice([0.0, 0.25, 1.0])
                crashed = chance.random() < self._crashes
                stays = chance.random() < self._results_stay
                run.at(now, Left(worker, "killed", crashed=crashed, results_stay=stays))
                if number > 0 and chance.random() < 0.5:
                    break  # for good, which the first one never is
                now += chance.choice(self._gaps)
                worker += self.workers if self._has_new_numbers else 0
                run.at(now, Joined(worker))
        return run


@st.composite
def histories(
    draw: st.DrawFn, kinds: Iterable[str] = KINDS, rough: bool | None = None, most: int = 12
) -> History:
    """A history of one of these kinds, of ``most`` workers; rough or not, if it is not said."""
    is_rough = draw(st.booleans()) if rough is None else rough
    return History(draw, draw(st.sampled_from(list(kinds))), rough=is_rough, most=most)
