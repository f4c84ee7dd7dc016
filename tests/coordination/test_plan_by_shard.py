"""The plan of rules that apply shards one by one: each shard of the plain plan is a step."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.histories import fixed

from quorate.coordination.plan import Plan, PlanByShard, from_json, home_shards


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, PlanByShard]:
    """A plan, and the same with each shard a step."""
    batch_size = draw(st.integers(1, 40))
    arguments = {
        "rows": draw(st.integers(1, 150)),
        "batch_size": batch_size,
        "shards": draw(st.integers(1, batch_size)),
        "seed": draw(st.integers(0, 5)),
        "shuffle": draw(st.booleans()),
    }
    return Plan(**arguments), PlanByShard(**arguments)


@given(plans(), st.integers(0, 2))
@fixed()
def test_the_steps_of_an_epoch_are_the_shards_of_the_plain_plan_in_order(
    both: tuple[Plan, PlanByShard], epoch: int
) -> None:
    plain, single = both
    first = epoch * plain.steps_per_epoch
    shards = [
        plain.shard(step, shard)
        for step in range(first, first + plain.steps_per_epoch)
        for shard in range(plain.shards_of(step))
    ]
    assert single.steps_per_epoch == len(shards)
    first = epoch * single.steps_per_epoch
    for step, rows in enumerate(shards, start=first):
        assert single.shards_of(step) == 1
        assert single.epoch(step) == epoch
        assert single.batch_rows(step) == len(rows) > 0
        assert np.array_equal(single.shard(step, 0), rows)
        assert np.array_equal(single.batch(step), rows)
    assert sorted(np.concatenate(shards).tolist()) == list(range(plain.rows))


def test_a_last_batch_of_fewer_rows_than_shards_has_a_step_per_row() -> None:
    plan = PlanByShard(rows=11, batch_size=8, shards=5, shuffle=False)
    assert plan.steps_per_epoch == 8
    assert [plan.shard(step, 0).tolist() for step in range(8, 16)] == [
        *([0], [1, 2], [3], [4, 5], [6, 7]),
        *([8], [9], [10]),
    ]


@given(plans(), st.integers(1, 12), st.integers(0, 200))
@fixed()
def test_each_step_is_at_home_at_one_place_and_a_place_is_at_home_in_a_run_of_each_batch(
    both: tuple[Plan, PlanByShard], workers: int, step: int
) -> None:
    _, plan = both
    homes = [plan.home_shards((rank, workers), step) for rank in range(workers)]
    assert sorted(map(len, homes)) == [0] * (workers - 1) + [1]
    ahead = range(step, step + plan.lookahead)
    for rank in range(workers):
        own = [t for t in ahead if plan.home_shards((rank, workers), t)]
        # Whoever is at home in full batches finds a step within reach.
        if home_shards((rank, workers), plan.shards) and plan.batch_size <= plan.rows:
            assert own or plan.steps_per_epoch % plan.shards


@given(plans())
@fixed()
def test_a_plan_is_made_again_from_what_is_saved_of_it(both: tuple[Plan, PlanByShard]) -> None:
    for plan in both:
        again = from_json(json.loads(json.dumps(plan.to_json())))
        assert type(again) is type(plan)
        assert vars(again) == vars(plan)


def test_every_place_is_at_home_as_often_as_the_next() -> None:
    plan = PlanByShard(rows=64, batch_size=16, shards=4)
    for workers in (1, 2, 4):
        counts = Counter(
            rank
            for step, rank in itertools.product(range(16), range(workers))
            if plan.home_shards((rank, workers), step)
        )
        assert set(counts.values()) == {16 // workers}
