"""The plan: which rows each shard of each step has, for ever.

Legend: R rows of the dataset, B rows of a batch, V shards, t step, s shard.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quorate.coordination.plan import Plan, PlanByShard, abridged, permutation

fixed = settings(max_examples=200, derandomize=True, deadline=None, database=None)

plans = st.builds(
    Plan,
    rows=st.integers(1, 200),
    batch_size=st.integers(1, 64),
    shards=st.integers(1, 16),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
)


# --- the order of an epoch ------------------------------------------------------------------------


@given(st.integers(0, 500), st.integers(0, 2**63), st.integers(0, 1000))
@fixed
def test_every_row_is_in_the_permutation_once(rows: int, seed: int, epoch: int) -> None:
    order = permutation(rows, seed, epoch)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(rows))


def test_the_permutation_depends_on_seed_and_epoch_and_nothing_else() -> None:
    order = permutation(1000, 1, 2)
    assert np.array_equal(order, permutation(1000, 1, 2))
    assert not np.array_equal(order, permutation(1000, 2, 2))
    assert not np.array_equal(order, permutation(1000, 1, 1))
    assert not np.array_equal(order, permutation(1000, 2, 1))


@pytest.mark.parametrize(
    ("rows", "seed", "epoch", "expected"),
    [
        (1, 0, 0, [0]),
        (10, 0, 0, [4, 8, 7, 6, 5, 2, 0, 1, 3, 9]),
        (10, 0, 1, [3, 5, 9, 6, 2, 8, 0, 4, 7, 1]),
        (10, 1, 0, [3, 0, 5, 9, 1, 4, 2, 8, 7, 6]),
        (60000, 42, 7, [48705, 48963, 56601, 26052, 29042, 8366, 17412, 43765, 24392, 32167]),
        (
            1000000,
            2**63,
            123,
            [501302, 652063, 114648, 510487, 17924, 341487, 529802, 477926, 87359, 293872],
        ),
    ],
)
def test_the_permutation_never_changes_between_releases(
    rows: int, seed: int, epoch: int, expected: list[int]
) -> None:
    """A resume with a newer release would repeat some rows and miss others."""
    assert permutation(rows, seed, epoch)[:10].tolist() == expected


@pytest.mark.parametrize("place", [0, 4, 9])
def test_every_row_is_as_often_at_a_place_as_any_other(place: int) -> None:
    rows, draws = 10, 4000
    by_seed = [permutation(rows, seed, 0)[place] for seed in range(draws)]
    by_epoch = [permutation(rows, 0, epoch)[place] for epoch in range(draws)]
    for drawn in (by_seed, by_epoch):
        counts = np.bincount(drawn, minlength=rows)
        chi_square = ((counts - draws / rows) ** 2).sum() / (draws / rows)
        assert chi_square < 27.9  # 9 degrees of freedom: 1 in 1,000 is above


# --- batches and shards ---------------------------------------------------------------------------


@given(plans, st.integers(0, 3))
@fixed
def test_the_batches_of_an_epoch_have_each_row_once(plan: Plan, epoch: int) -> None:
    first = epoch * plan.steps_per_epoch
    steps = range(first, first + plan.steps_per_epoch)
    batches = [plan.batch(step) for step in steps]
    assert sorted(np.concatenate(batches).tolist()) == list(range(plan.rows))
    assert {plan.epoch(step) for step in steps} == {epoch}
    assert [len(batch) for batch in batches] == [plan.batch_rows(step) for step in steps]
    assert all(len(batch) == plan.batch_size for batch in batches[:-1])
    assert 1 <= len(batches[-1]) <= plan.batch_size


@given(plans, st.integers(0, 1000))
@fixed
def test_the_shards_of_a_step_are_its_batch_cut_evenly(plan: Plan, step: int) -> None:
    shards = [plan.shard(step, shard) for shard in range(plan.shards_of(step))]
    assert np.array_equal(np.concatenate(shards), plan.batch(step))
    sizes = {len(shard) for shard in shards}
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert len(shards) == min(plan.shards, plan.batch_rows(step))


def test_the_last_batch_of_an_epoch_has_the_rows_that_are_left() -> None:
    plan = Plan(rows=10, batch_size=4, shards=2, shuffle=False)
    assert plan.steps_per_epoch == 3
    assert [plan.batch_rows(step) for step in range(6)] == [4, 4, 2, 4, 4, 2]
    assert [plan.epoch(step) for step in range(6)] == [0, 0, 0, 1, 1, 1]
    assert plan.batch(2).tolist() == [8, 9]
    assert plan.batch(3).tolist() == [0, 1, 2, 3]


def test_a_last_batch_of_fewer_rows_than_shards_has_one_shard_per_row() -> None:
    plan = Plan(rows=11, batch_size=8, shards=5, shuffle=False)
    assert [plan.shards_of(step) for step in range(4)] == [5, 3, 5, 3]
    assert [plan.shard(0, s).tolist() for s in range(5)] == [[0], [1, 2], [3], [4, 5], [6, 7]]
    assert [plan.shard(1, s).tolist() for s in range(3)] == [[8], [9], [10]]


def test_a_batch_larger_than_the_dataset_is_the_dataset() -> None:
    plan = Plan(rows=3, batch_size=100, shards=2, shuffle=False)
    assert plan.steps_per_epoch == 1
    assert plan.batch(5).tolist() == [0, 1, 2]


@given(st.integers(1, 100), st.integers(1, 20), st.integers(0, 50))
@fixed
def test_without_a_shuffle_the_rows_keep_their_order(rows: int, batch_size: int, step: int) -> None:
    plan = Plan(rows=rows, batch_size=batch_size, shards=4, shuffle=False)
    start = step % plan.steps_per_epoch * batch_size
    assert plan.batch(step).tolist() == list(range(start, min(start + batch_size, rows)))


def test_epochs_differ_and_a_step_is_always_the_same() -> None:
    plan = Plan(rows=64, batch_size=64, shards=4, seed=3)
    epochs = [plan.batch(step).tolist() for step in range(5)]
    assert len({tuple(epoch) for epoch in epochs}) == 5
    # Backwards, and by a plan that has never been asked before: position is a pure function.
    for step in reversed(range(5)):
        assert plan.batch(step).tolist() == epochs[step]
        fresh = Plan(rows=64, batch_size=64, shards=4, seed=3)
        assert fresh.batch(step).tolist() == epochs[step]


@given(plans, st.integers(0, 100), st.integers(1, 16))
@fixed
def test_the_rows_of_a_batch_do_not_depend_on_the_shards(
    plan: Plan, step: int, shards: int
) -> None:
    other = Plan(
        rows=plan.rows,
        batch_size=plan.batch_size,
        shards=shards,
        seed=plan.seed,
        shuffle=plan.shuffle,
    )
    assert np.array_equal(plan.batch(step), other.batch(step))


# --- row numbers for people -----------------------------------------------------------------------


def test_a_few_row_numbers_are_shown_and_many_are_abridged() -> None:
    assert abridged(np.array([4, 17, 2])) == "[4, 17, 2]"
    assert abridged(np.arange(8)) == "[0, 1, 2, 3, 4, 5, 6, 7]"
    assert abridged(np.arange(64), most=3) == "[0, 1, 2, ... 64 in all]"


@pytest.mark.parametrize("kind", [Plan, PlanByShard])
def test_the_first_shard_with_a_single_row(kind: type[Plan]) -> None:
    for rows in range(1, 20):
        for size, shards in ((4, 4), (6, 3), (7, 5)):
            plan = kind(rows=rows, batch_size=size, shards=shards)
            epoch = plan.steps_per_epoch
            for start in range(epoch):
                for stop in (start, start + 1, start + 2 * epoch):
                    found = [
                        (step, shard)
                        for step in range(start, stop)
                        for shard in range(plan.shards_of(step))
                        if len(plan.shard(step, shard)) == 1
                    ]
                    assert plan.row_alone(range(start, stop)) == (found[0] if found else None)
