"""Simulated runs: invariants in any order of events, and costs of rules in time and staleness.

The simulator runs each of many random histories, and checks its invariants after every event.
"""

import hashlib
import itertools
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from msgspec import structs
from support.histories import KINDS, History
from support.simulator import Simulation

from quorate.coordination.open_steps import OpenSteps
from quorate.coordination.protocol import Abort, Finish, Joined, Left, Stop
from quorate.coordination.rules import parse
from quorate.coordination.running_shards import RunningShards
from quorate.coordination.tally import Tally
from quorate.coordination.workers import Assignment, Workers
from quorate.simulation.virtual_run import VirtualRun

ENDED = "all steps are done"
slow = pytest.mark.slow

# Hashes of all decisions in the histories. After a deliberate change of decisions: check that
# invariants and test_histories.py are as you want them, and write the new hashes here.
DECISIONS = {
    ("sync", 12): "74dae2158f52bb94",
    ("quorum", 12): "3add85d6204a3c99",
    ("async", 12): "95ed82a664db8d7f",
    ("bounded", 12): "113348ae3015280d",
    ("sync", 40): "62f2672617d0e201",
    ("quorum", 40): "f1845b01c1bc1fce",
    ("async", 40): "a1ba12a6f3f7ed3e",
    ("bounded", 40): "9a952f3b2e15138b",
}


def noted(run: Simulation, decisions: Any) -> None:
    """Put the decisions of the last event into a hash; reasons in words are left out."""
    now, _, effects = run.log[-1]
    for effect in effects:
        fields = {name: value for name, value in structs.asdict(effect).items() if name != "reason"}
        decisions.update(f"{now} {type(effect).__name__} {fields}\n".encode())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("histories", "most"), [(60, 12), pytest.param(40, 40, marks=slow)], ids=["few", "forty"]
)
def test_each_step_is_applied_once_over_stops_and_resumes_by_known_decisions(
    kind: str, histories: int, most: int
) -> None:
    decisions = hashlib.sha256()
    for seed in range(histories):
        history = History(kind, seed, most=most)
        stops_s = [history.chance.uniform(0.0, 30.0) for _ in range(seed % 3)]
        order: list[int] = []
        fates: Counter[str] = Counter()
        under_way = 1 if not history.rule.by_shard else history.rule.staleness + 1
        run = history.simulation()
        for stop_s in [*stops_s, math.inf]:
            run.at(stop_s, Stop("SIGTERM"))
            before = None
            while run.finish is None and run.abort is None:
                run.advance()  # raises InvariantError
                noted(run, decisions)
                if run.log[-1][1] == Stop("SIGTERM"):
                    before = run.applied
            assert before is None or run.applied <= before + under_way
            order += run.order
            fates += {fate: count.total() for fate, count in run.fates.items()}
            c = run.coordinator
            if run.abort is not None:
                break
            left_open = sorted({*range(max(order, default=-1) + 1)} - {*order})
            assert len(order) == len({*order}) == c.applied
            tally = Tally(json.loads(json.dumps(c.tally.to_json())))
            decisions.update(f"{left_open} {tally.to_json()}\n".encode())
            run = history.simulation(first_step=c.applied, left_open=left_open, tally=tally)
        else:
            assert sorted(order) == list(range(history.steps))
            assert {fate: sum(tally.to_json()[fate]) for fate in fates} == fates
    found = decisions.hexdigest()[:16]
    assert found == DECISIONS[kind, most], found


# --- by hand --------------------------------------------------------------------------------------


def played(workers: int, **options: Any) -> Simulation:
    run = Simulation(**({"shards": 1} | options))
    run.at(0.0, *map(Joined, range(workers)))
    run.run()
    assert run.finish == Finish(run.steps, ENDED)
    return run


@pytest.mark.parametrize(("run_s", "runs"), [(0.0, 0), (2.0, 4), (100.0, 2)])
def test_short_shards_are_dealt_in_runs(run_s: float, runs: int) -> None:
    run = played(2, shards=8, steps=2, run_s=run_s)
    assert (run.now, run.copies) == (8.0, 0)
    assert run.runs >= runs
    assert (run.runs == 0) == (run_s == 0)


def test_a_crash_in_a_run_blames_no_shard_and_two_in_one_shard_do() -> None:
    # Worker 1 computes 5 to 7 as a run from 1 s on, and crashes: nobody can tell in which shard.
    # Dealt shard by shard, worker 1 crashes in 5 and goes on with 6 and 7, and worker 0, done at 4
    # s, crashes in 5 too.
    run = Simulation(shards=8, steps=3, run_s=100.0, results_stay=True)
    run.at(0.0, Joined(0), Joined(1))
    for at in (1.5, 1.9):
        run.at(at, Left(1, "killed", crashed=True, results_stay=True), Joined(1))
    run.at(4.5, Left(0, "killed", crashed=True, results_stay=True))
    run.run()
    assert (run.runs, run.abort) == (2, Abort(0, 0, 5))


def test_a_step_is_applied_unless_an_older_one_would_be_stale_as_looking_at_all_finds() -> None:
    """Histories have too few open steps for the steps not looked at to matter."""
    chance, waits = random.Random(0), 0
    for bound in [0, 1, *range(2, 60, 3)]:
        steps = OpenSteps(0, [], RunningShards(Workers(), 1.5), bound)
        slow = chance.uniform(0.0, 0.3)
        for number in range(8 * bound + 8):
            steps.begin(number, 1, 1, 0.0)
            steps.assign(Assignment(0, number, 0, steps.applied, 0.0))
            computing = [step for step in steps.by_number.values() if step.computing]
            while computing and (len(steps.by_number) > bound or chance.random() < 0.6):
                is_late = chance.random() < slow
                step = computing.pop(-1 if is_late else chance.randrange(len(computing)))
                (task,) = step.computing.values()
                steps.finish(task)
                steps.hold(step, [0], task)
                while True:
                    found, held = (
                        steps.next_to_apply(),
                        [s for s in steps.by_number.values() if s.held],
                    )
                    oldest = min(held, key=lambda s: s.age, default=None)
                    others = sorted(s.age[0] for s in steps.by_number.values() if s is not oldest)
                    least = min((v - i for i, v in enumerate(others)), default=math.inf)
                    has_time = least >= steps.applied + 1 - bound
                    assert found is (oldest if has_time else None)
                    waits += oldest is not None and not has_time
                    if found is None:
                        break
                    steps.close(found.number)
    assert waits > 100


def lines_of(play: Callable[[], object]) -> int:
    """Count the lines run in the coordinator's folder: the same count on any machine."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if "coordination" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        play()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("rule", ["bounded:{most}", "async", "sync"])
def test_an_event_costs_no_more_with_many_workers_and_steps_open(rule: str) -> None:
    def per_event(workers: int) -> float:
        run = VirtualRun(
            places=["host"] * workers,
            shards=workers,
            batches=2,
            rule=parse(rule.format(most=4 * workers)),
            # One worker is late with everything: finished steps wait for its step.
            shard_s=lambda worker, step, _: 40.0 if worker == 0 else 1.0 + step % 7 / 100,
        )
        return lines_of(run.play) / run.events

    assert per_event(120) < 1.8 * per_event(20)  # log2: 6.9 and 4.3


# --- costs of rules -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(("shards", "workers"), [(2, 3), (8, 3), (16, 16), (32, 8)])
def test_a_permanently_slow_worker_costs_a_fifth_of_the_pace_at_most(
    shards: int, workers: int, is_first: bool
) -> None:
    """A shard takes 0.8 to 1.2 s, and 10 times as long on the slow worker."""

    def run_of(workers: int, slow: int | None) -> Simulation:
        chance = random.Random(0)

        def time_s(worker: int, step: int, shard: int) -> float:
            return chance.uniform(0.8, 1.2) * (10.0 if worker == slow else 1.0)

        return played(workers, shards=shards, steps=40, time_s=time_s)

    run = run_of(workers, 0 if is_first else workers - 1)
    assert run.now < 1.2 * run_of(workers - 1, None).now
    steps_s = [end - begin for begin, end in itertools.pairwise([0.0, *run.applied_at])]
    assert max(steps_s) < 8.0  # no step waits for a shard there: 8 s at least
