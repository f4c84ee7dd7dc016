"""An order of the user's: whatever it is, each row of an epoch is dealt once, to whoever computes.

Legend: R rows of the dataset, V shards.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.messages import expect_error
from support.parabola import DATA, trainer

import quorate
from quorate.coordination.plan import Order, Plan, PlanByShard, Rows, from_json, permutation
from quorate.errors import CheckpointError, SettingError
from quorate.replica.digest import digest

fixed = settings(max_examples=100, derandomize=True, deadline=None, database=None)


def last_first(rows: Rows) -> Rows:
    return rows[::-1]


def even_first(rows: Rows) -> Rows:
    return rows[np.argsort(rows % 2, kind="stable")]


@given(
    st.sampled_from([Plan, PlanByShard]),
    st.integers(1, 100),
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(0, 3),
    st.booleans(),
)
@fixed
def test_the_batches_of_an_epoch_are_the_order_cut(
    kind: type[Plan], rows: int, batch_size: int, shards: int, epoch: int, shuffle: bool
) -> None:
    plan = kind(
        rows=rows,
        batch_size=min(batch_size, rows),
        shards=min(shards, batch_size, rows),
        seed=5,
        shuffle=shuffle,
        order=even_first,
    )
    first = epoch * plan.steps_per_epoch
    dealt = [plan.batch(step) for step in range(first, first + plan.steps_per_epoch)]
    before = permutation(rows, 5, epoch) if shuffle else np.arange(rows)
    assert np.array_equal(np.concatenate(dealt), even_first(before))
    there = from_json(plan.to_json(), even_first)  # in a worker process
    assert np.array_equal(there.batch(first), plan.batch(first))


def test_an_evaluation_in_a_worker_process_has_no_order() -> None:
    plan = Plan(rows=6, batch_size=6, shards=1, shuffle=False)
    assert from_json(plan.to_json(), last_first).batch(0).tolist() == [0, 1, 2, 3, 4, 5]


def test_an_order_may_change_the_array_that_it_is_given() -> None:
    def in_place(rows: Rows) -> Rows:
        rows.sort()
        return rows

    plan = Plan(rows=30, batch_size=10, shards=1, order=in_place)
    assert plan.batch(1).tolist() == list(range(10, 20))


@pytest.mark.parametrize(
    ("order", "got"),
    [
        (lambda rows: rows[:-1], "int64 of shape (9,)"),
        (lambda rows: rows[:, None], "int64 of shape (10, 1)"),
        (lambda rows: rows / 1, "float64 of shape (10,)"),
        (lambda rows: np.where(rows == 3, 4, rows), "row 3, 0 times"),
        (lambda rows: np.where(rows == 4, 3, rows), "row 3, 2 times"),
        (lambda rows: rows + 1, "row 10, 1 times"),
        (lambda rows: rows - 1, "row -1, 1 times"),
    ],
)
def test_rows_that_are_missing_or_there_twice_are_named(order: Order, got: str) -> None:
    plan = Plan(rows=10, batch_size=5, shards=1, order=order)
    with expect_error(SettingError, name="order", got=got):
        plan.batch(0)


def digest_of(run: quorate.Trainer) -> str:
    return digest(run.model.state_dict().items())


def test_the_bits_follow_from_the_order_and_not_from_the_workers(tmp_path: Path) -> None:
    digests = {}
    for name, order in (("none", None), ("even", even_first), ("last", last_first)):
        for workers in (1, 2):
            run = trainer(workers=workers, order=order)
            run.fit(DATA, epochs=3)
            digests[name, workers] = digest_of(run)
    assert len(set(digests.values())) == 3
    assert all(digests[name, 1] == digests[name, 2] for name, _ in digests)

    trainer(tmp_path, order=even_first).fit(DATA, steps=5)  # in the middle of an epoch
    resumed = trainer(tmp_path, workers=2, order=even_first)
    resumed.fit(DATA, epochs=3)
    assert digest_of(resumed) == digests["even", 1]
    with expect_error(CheckpointError):
        trainer(tmp_path).fit(DATA, epochs=4)


def test_a_wrong_order_is_found_before_anything_starts() -> None:
    with expect_error(SettingError, name="order", got="row 0, 2 times"):
        trainer(order=lambda rows: np.where(rows == 7, 0, rows)).fit(DATA)
    with expect_error(SettingError, name="order", got="list"):
        trainer(order=[1, 2])
