"""The rows of an epoch that fill no batch: a batch of their own, none, or part of the one before.

Legend: R rows of the dataset, B rows of a batch, V shards.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quorate.coordination.epochs import LAST
from quorate.coordination.plan import Plan, PlanByShard, from_json, permutation

fixed = settings(max_examples=200, derandomize=True, deadline=None, database=None)


@given(
    st.sampled_from(LAST),
    st.integers(1, 150),
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(0, 2),
)
@fixed
def test_each_row_is_in_an_epoch_once_but_for_what_is_dropped(
    last: str, rows: int, batch_size: int, shards: int, epoch: int
) -> None:
    batch_size = min(batch_size, rows)
    shards = min(shards, batch_size)
    plans = [
        kind(rows=rows, batch_size=batch_size, shards=shards, seed=3, last=last)
        for kind in (Plan, PlanByShard)
    ]
    left = rows % batch_size
    expected = permutation(rows, 3, epoch)[: rows - left if last == "drop" else rows]
    for plan in plans:
        steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
        dealt = [plan.batch(step) for step in steps]
        assert np.array_equal(np.concatenate(dealt), expected)
        assert [len(batch) for batch in dealt] == [plan.batch_rows(step) for step in steps]
        of_shards = [plan.shard(t, s) for t in steps for s in range(plan.shards_of(t))]
        assert np.array_equal(np.concatenate(of_shards), expected)
        assert all(plan.epoch(step) == epoch for step in steps)
        there = from_json(json.loads(json.dumps(plan.to_json())))
        assert np.array_equal(there.batch(steps[-1]), plan.batch(steps[-1]))
    sizes = [plans[0].batch_rows(step) for step in range(plans[0].steps_per_epoch)]
    assert sizes[:-1] == [batch_size] * (len(sizes) - 1)
    assert (
        sizes[-1]
        == {
            "short": left or batch_size,
            "drop": batch_size,
            "join": batch_size + left,
        }[last]
    )


@pytest.mark.parametrize(
    ("last", "sizes"), [("short", [4, 4, 2]), ("drop", [4, 4]), ("join", [4, 6])]
)
def test_ten_rows_in_batches_of_four(last: str, sizes: list[int]) -> None:
    plan = Plan(rows=10, batch_size=4, shards=3, last=last)
    assert [plan.batch_rows(step) for step in range(2 * len(sizes))] == 2 * sizes
    assert [len(plan.shard(len(sizes) - 1, s)) for s in range(min(3, sizes[-1]))] == {
        "short": [1, 1],
        "drop": [1, 1, 2],
        "join": [2, 2, 2],
    }[last]
