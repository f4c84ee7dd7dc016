"""What holds in any order of events, under every rule.

Each of many random histories is run by the simulator, which checks after every event what it lists.

Legend: V shards of a step, N workers. w0 is worker 0, and (2, 5) is shard 5 of step 2.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.histories import KINDS, History, fixed, histories
from support.scripted import (
    ENDED,
)
from support.simulator import Simulation

from quorate.coordination.protocol import (
    Abort,
    Finish,
    Joined,
    Left,
    Stop,
)
from quorate.coordination.rules import Async, Bounded, Rule
from quorate.coordination.tally import Tally


@pytest.mark.parametrize("rough", [False, True], ids=["smooth", "rough"])
@pytest.mark.parametrize(
    ("kind", "examples"), [("sync", 300), ("quorum", 150), ("async", 100), ("bounded", 100)]
)
def test_a_run_ends_after_its_last_update(kind: str, examples: int, rough: bool) -> None:
    @given(histories([kind], rough=rough))
    @fixed(examples)
    def check(history: History) -> None:
        run = history.simulation()
        run.run()  # raises InvariantError
        if run.abort is None:
            assert run.finish == Finish(history.steps, ENDED)
            assert sorted(run.order) == list(range(history.steps))

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_over_stops_and_resumes_every_step_is_applied_once(kind: str) -> None:
    @given(histories([kind]), st.lists(st.floats(0.0, 30.0), max_size=3))
    @fixed()
    def check(history: History, stops_s: list[float]) -> None:
        order: list[int] = []
        fates: Counter[str] = Counter()
        run = history.simulation()
        for stop_s in [*stops_s, math.inf]:
            run.at(stop_s, Stop("SIGTERM"))
            run.run()  # raises InvariantError
            order += run.order
            fates += {fate: count.total() for fate, count in run.fates.items()}
            if run.abort is not None:
                return
            c = run.coordinator
            assert set(order) == set(range(c.applied + len(c.left_open))) - set(c.left_open)
            tally = Tally(json.loads(json.dumps(c.tally.to_json())))
            run = history.simulation(first_step=c.applied, left_open=c.left_open, tally=tally)
        assert sorted(order) == list(range(history.steps))
        assert {fate: sum(tally.to_json()[fate]) for fate in fates} == fates

    check()


@given(histories(), st.floats(0.0, 40.0))
@fixed(300)
def test_a_stop_makes_no_more_updates_than_steps_were_under_way(
    history: History, stop_s: float
) -> None:
    run = history.simulation()
    run.at(stop_s, Stop("SIGTERM"))
    while not (run.finish or run.abort or (run.log and run.log[-1][1] == Stop("SIGTERM"))):
        run.advance()
    before = run.applied
    run.run()
    bound = 1 if not history.rule.by_shard else min(history.rule.staleness + 1, history.steps)
    assert run.applied <= before + bound


@given(st.integers(1, 5), st.integers(1, 8), st.booleans(), st.integers(0, 1_000_000))
@fixed(300)
def test_a_run_survives_workers_that_hang_again_and_again(
    workers: int, shards: int, results_stay: bool, seed: int
) -> None:
    chance = random.Random(seed)
    run = Simulation(
        shards=shards,
        steps=10,
        time_s=lambda worker, step, shard: math.inf if chance.random() < 0.2 else 1.0,
        timeout_s=5.0,
        attempts=100,
        end_s=0.25,
        results_stay=results_stay,
    )
    run.at(0.0, *map(Joined, range(workers)))
    run.run()
    assert run.finish == Finish(10, ENDED)


@given(st.integers(1, 12), st.integers(1, 8))
@fixed()
def test_an_undisturbed_step_takes_as_long_as_the_most_shards_of_a_worker(
    shards: int, workers: int
) -> None:
    run = Simulation(shards=shards, steps=3)
    run.at(0.0, *map(Joined, range(workers)))
    run.run()
    assert run.now == 3 * math.ceil(shards / workers)
    assert run.copies == 0


@pytest.mark.parametrize(("run_s", "runs"), [(0.0, 0), (2.0, 4), (100.0, 2)])
def test_short_shards_are_dealt_in_runs(run_s: float, runs: int) -> None:
    run = Simulation(shards=8, steps=2, run_s=run_s)
    run.at(0.0, Joined(0), Joined(1))
    run.run()
    assert run.now == 8.0
    assert run.runs >= runs
    assert run.copies == 0
    assert (run.runs == 0) == (run_s == 0)


def test_a_crash_in_a_run_blames_no_shard_and_two_in_one_shard_do() -> None:
    # Worker 1 computes 5 to 7 as a run from 1 s on, and crashes: nobody can tell in which. Dealt
    # one by one, it crashes in 5, goes on with the others, and worker 0, which is done at 4 s,
    # crashes in 5 too.
    run = Simulation(shards=8, steps=3, run_s=100.0, results_stay=True)
    run.at(0.0, Joined(0), Joined(1))
    for at in (1.5, 1.9):
        run.at(at, Left(1, "killed", crashed=True, results_stay=True), Joined(1))
    run.at(4.5, Left(0, "killed", crashed=True, results_stay=True))
    run.run()
    assert run.runs == 2
    assert run.abort == Abort(0, 0, 5)


def test_five_hundred_workers_compute_five_hundred_shards() -> None:
    run = Simulation(shards=500, steps=1)
    run.at(0.0, *map(Joined, range(500)))
    run.run()
    assert run.finish == Finish(1, ENDED)
    assert set(run.computed.values()) == {1}


@pytest.mark.parametrize("rule", [Async(), Bounded(29)], ids=lambda rule: rule.name)
def test_thirty_workers_of_thirty_speeds_are_never_idle(rule: Rule) -> None:
    run = Simulation(
        shards=1, steps=600, rule=rule, time_s=lambda worker, step, shard: 1.0 + worker / 100
    )
    run.at(0.0, *map(Joined, range(30)))
    run.run()
    assert run.finish == Finish(600, ENDED)
    pace = sum(1 / (1.0 + worker / 100) for worker in range(30))
    assert run.now < 600 / pace + 1.3
