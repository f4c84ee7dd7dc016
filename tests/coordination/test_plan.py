"""The plan: the rows of each shard of each step, for ever.

Legend: R rows of the dataset, B rows of a batch, V shards, t step, s shard.
"""

import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import fixed
from support.messages import expect_error

from quorate.coordination.epochs import LAST, Round, takes_of
from quorate.coordination.plan import (
    Order,
    Plan,
    PlanByShard,
    Rows,
    from_json,
    home_shards,
    permutation,
)
from quorate.coordination.sampling import Sampling, repeats
from quorate.errors import SettingError


def even_first(rows: Rows) -> Rows:
    return rows[np.argsort(rows % 2, kind="stable")]


@st.composite
def settings(draw: st.DrawFn) -> dict[str, Any]:
    rows = draw(st.integers(1, 150))
    dealt = draw(st.none() | st.integers(1, 100))
    batch_size = draw(st.integers(1, min(40, dealt or rows)))
    return {
        "rows": rows,
        "batch_size": batch_size,
        "shards": draw(st.integers(1, min(8, batch_size))),
        "seed": draw(st.integers(0, 5)),
        "shuffle": draw(st.booleans()),
        "last": draw(st.sampled_from(LAST)),
        "order": draw(st.sampled_from([None, even_first])),
        "sampling": Sampling(np.arange(1, rows + 1), rows=dealt) if dealt else None,
    }


# --- the order of an epoch ------------------------------------------------------------------------


@given(st.integers(0, 500), st.integers(0, 2**63), st.integers(0, 1000))
@fixed()
def test_every_row_is_in_the_permutation_once(rows: int, seed: int, epoch: int) -> None:
    order = permutation(rows, seed, epoch)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(rows))
    assert np.array_equal(order, permutation(rows, seed, epoch))


@pytest.mark.parametrize(
    ("rows", "seed", "epoch", "expected"),
    [
        (1, 0, 0, [0]),
        (10, 0, 0, [4, 8, 7, 6, 5, 2, 0, 1, 3, 9]),
        (10, 0, 1, [3, 5, 9, 6, 2, 8, 0, 4, 7, 1]),
        (10, 1, 0, [3, 0, 5, 9, 1, 4, 2, 8, 7, 6]),
        (60000, 42, 7, [48705, 48963, 56601, 26052, 29042, 8366, 17412, 43765, 24392, 32167]),
        (1000000, 2**63, 123, [501302, 652063, 114648, 510487, 17924]),
    ],
)
def test_the_permutation_never_changes_between_releases(
    rows: int, seed: int, epoch: int, expected: list[int]
) -> None:
    """A resume with a newer release would repeat some rows and miss some."""
    assert permutation(rows, seed, epoch)[: len(expected)].tolist() == expected


# --- batches and shards ---------------------------------------------------------------------------


@given(settings(), st.integers(0, 2))
@fixed()
def test_an_epoch_is_its_order_cut_into_batches_and_these_evenly_into_shards(
    given: dict[str, Any], epoch: int
) -> None:
    rows, batch_size, last = given["rows"], given["batch_size"], given["last"]
    plan, single = Plan(**given), PlanByShard(**given)
    expected = permutation(rows, given["seed"], epoch) if given["shuffle"] else np.arange(rows)
    if given["sampling"]:
        expected = given["sampling"].drawn(given["seed"], epoch)
    expected = even_first(expected) if given["order"] else expected
    times, left = repeats(expected), len(expected) % batch_size
    expected = expected[: len(expected) - left if last == "drop" else None]

    steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
    sizes = [plan.batch_rows(step) for step in steps]
    ends = {"short": left or batch_size, "drop": batch_size, "join": batch_size + left}
    assert sizes == [batch_size] * (len(sizes) - 1) + [ends[last]]
    assert np.array_equal(np.concatenate([plan.batch(step) for step in steps]), expected)
    shards = []
    for step in reversed(steps):  # a pure function of the position
        own = [plan.shard(step, shard) for shard in range(plan.shards_of(step))]
        assert np.array_equal(np.concatenate(own), plan.batch(step))
        assert {max(map(len, own)) - min(map(len, own))} <= {0, 1}
        assert len(own) == min(plan.shards, plan.batch_rows(step))
        shards = own + shards
    assert min(map(len, shards)) >= 1

    # Under rules by shard, each of those shards is a step.
    first = epoch * single.steps_per_epoch
    assert single.steps_per_epoch == len(shards)
    for step, own in enumerate(shards, start=first):
        assert (single.shards_of(step), single.epoch(step)) == (1, epoch)
        assert single.batch_rows(step) == len(own)
        assert np.array_equal(single.shard(step, 0), own)
        assert np.array_equal(single.batch(step), own)

    for made in (plan, single):  # in a worker process
        again = from_json(json.loads(json.dumps(made.to_json())), made.order, made.sampling)
        assert (type(again), again.to_json()) == (type(made), made.to_json())
        again = pickle.loads(pickle.dumps(again))  # in a loader process that is no fork
        for step in (epoch * made.steps_per_epoch, (epoch + 1) * made.steps_per_epoch):
            assert np.array_equal(again.batch(step), made.batch(step))
        if made.sampling is not None:
            first = epoch * made.steps_per_epoch
            of_each: list[Any] = [
                made.repeats(step, shard)
                for step in range(first, first + made.steps_per_epoch)
                for shard in range(made.shards_of(step))
            ]
            assert np.array_equal(np.concatenate(of_each), times[: len(expected)])
    other = Plan(**given | {"shards": 1 + given["shards"] % batch_size})
    assert np.array_equal(other.batch(steps[-1]), plan.batch(steps[-1]))


def test_a_last_batch_of_fewer_rows_than_shards_has_one_shard_per_row() -> None:
    plan = Plan(rows=11, batch_size=8, shards=5, shuffle=False)
    assert [plan.shards_of(step) for step in range(4)] == [5, 3, 5, 3]
    full, short = [[0], [1, 2], [3], [4, 5], [6, 7]], [[8], [9], [10]]
    assert [plan.shard(0, s).tolist() for s in range(5)] == full
    assert [plan.shard(1, s).tolist() for s in range(3)] == short
    whole = Plan(rows=3, batch_size=100, shards=2, shuffle=False)  # larger than the dataset
    assert (whole.steps_per_epoch, whole.batch(5).tolist()) == (1, [0, 1, 2])


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


# --- homes ----------------------------------------------------------------------------------------


def test_with_more_workers_than_shards_the_first_have_a_home_each() -> None:
    assert [list(home_shards((rank, 5), 3)) for rank in range(5)] == [[0], [1], [2], [], []]
    assert [list(home_shards((rank, 3), 8)) for rank in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]


# --- an order of the user's -----------------------------------------------------------------------


def test_an_order_may_change_its_array_and_an_evaluation_has_none() -> None:
    def in_place(rows: Rows) -> Rows:
        rows.sort()
        return rows

    plan = Plan(rows=30, batch_size=10, shards=1, order=in_place)
    assert plan.batch(1).tolist() == list(range(10, 20))
    plain = Plan(rows=6, batch_size=6, shards=1, shuffle=False)
    assert from_json(plain.to_json(), even_first).batch(0).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("order", "got"),
    [
        (lambda rows: rows[:-1], "int64 of shape (9,)"),
        (lambda rows: rows / 1, "float64 of shape (10,)"),
        (lambda rows: np.where(rows == 3, 4, rows), "row 3, 0 times"),
        (lambda rows: np.where(rows == 4, 3, rows), "row 3, 2 times"),
        (lambda rows: rows + 1, "row 10, 1 times"),
        (lambda rows: rows - 1, "row -1, 1 times"),
        (lambda rows: np.multiply(rows, 0, out=rows), "row 0, 10 times"),
    ],
)
def test_rows_that_are_missing_or_there_twice_are_named(order: Order, got: str) -> None:
    plan = Plan(rows=10, batch_size=5, shards=1, order=order)
    with expect_error(SettingError, name="order", got=got):
        plan.batch(0)


# --- rounds of phases ----------------------------------------------------------------------------


def a_round(text: str, **new_batch: bool) -> Round:
    phases = tuple(text)
    return Round(phases, takes_of(phases, [new_batch.get(name) for name in phases]))


@pytest.mark.parametrize(
    ("text", "new_batch", "takes"),
    [
        ("dg", {}, (0, 0)),
        ("ddg", {}, (0, 1, 1)),
        ("dgdg", {}, (0, 0, 1, 1)),
        ("ddg", {"d": False}, (0, 0, 0)),
        ("dg", {"g": True}, (0, 1)),
        ("ddg", {"d": True, "g": True}, (0, 1, 2)),  # each round begins with a new batch anyway
        ("abc", {}, (0, 0, 0)),
    ],
)
def test_which_batch_each_update_takes(
    text: str, new_batch: dict[str, bool], takes: tuple[int, ...]
) -> None:
    assert a_round(text, **new_batch).takes == takes


@pytest.mark.parametrize("text", ["dg", "ddg", "dgdg", "dddddg", "ddgg"])
@pytest.mark.parametrize("rows", [25, 33, 47])
def test_an_epoch_is_that_of_a_plain_loop(text: str, rows: int) -> None:
    """Compare with a loop over each epoch's batches, with rounds begun anew; by another process."""
    round_ = a_round(text)
    plain = Plan(rows=rows, batch_size=5, shards=2, seed=4)
    made = Plan(rows=rows, batch_size=5, shards=2, seed=4, round=round_)
    plan = from_json(json.loads(json.dumps(made.to_json())))
    expected = []
    for epoch in range(3):
        for batch in range(plain.steps_per_epoch):
            of_round = batch % round_.batches
            expected += [
                (epoch, name, plain.batch(epoch * plain.steps_per_epoch + batch).tolist())
                for name, take in zip(round_.phases, round_.takes, strict=True)
                if take == of_round
            ]
    for each in (made, plan):
        assert expected == [
            (each.epoch(step), each.phase(step), each.batch(step).tolist())
            for step in range(3 * each.steps_per_epoch)
        ]
    for name in set(text):
        per_epoch = sum(phase == name for _, phase, _ in expected) / 3
        assert plan.updates_of(name) == per_epoch
    for step, (_, _, rows_of) in enumerate(expected):
        assert plan.batch_rows(step) == len(rows_of)
        shards = [plan.shard(step, s).tolist() for s in range(plan.shards_of(step))]
        assert [row for shard in shards for row in shard] == rows_of


def test_a_phase_that_an_epoch_is_too_short_for_or_that_there_is_not() -> None:
    with expect_error(SettingError, name="batch_size", got="5 of 5 rows"):
        Plan(rows=5, batch_size=5, shards=1, round=a_round("ddg"))
    Plan(rows=5, batch_size=5, shards=1, round=a_round("ddg", d=False))
    with expect_error(SettingError, name="phase", got="e"):
        Plan(rows=20, batch_size=5, shards=1, round=a_round("ddg")).updates_of("e")
    with expect_error(SettingError, name="phase", got="d"):
        Plan(rows=20, batch_size=5, shards=1).updates_of("d")
