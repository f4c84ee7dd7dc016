"""Rounds of phases, and the plan that goes by them."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from support.messages import expect_error

from quorate.coordination.plan import Plan, PlanByPhase, from_json
from quorate.coordination.rounds import Round, takes_of
from quorate.errors import SettingError


def a_round(text: str, **new_batch: bool) -> Round:
    phases = tuple(text)
    return Round(phases, takes_of(phases, [new_batch.get(name) for name in phases]))


@pytest.mark.parametrize(
    ("text", "new_batch", "takes"),
    [
        ("dg", {}, (0, 0)),
        ("ddg", {}, (0, 1, 1)),
        ("dddddg", {}, (0, 1, 2, 3, 4, 4)),
        ("dgdg", {}, (0, 0, 1, 1)),
        ("ddg", {"d": False}, (0, 0, 0)),
        ("dg", {"g": True}, (0, 1)),
        ("ddg", {"d": True, "g": True}, (0, 1, 2)),  # a round begins with a new one anyway
        ("abc", {}, (0, 0, 0)),
        ("d", {}, (0,)),
    ],
)
def test_which_batch_each_update_takes(
    text: str, new_batch: dict[str, bool], takes: tuple[int, ...]
) -> None:
    assert a_round(text, **new_batch).takes == takes


@pytest.mark.parametrize("text", ["dg", "ddg", "dgdg", "dddddg", "ddgg"])
@pytest.mark.parametrize("rows", [25, 33, 47])
def test_an_epoch_is_that_of_a_plain_loop(text: str, rows: int) -> None:
    """A loop over the batches of each epoch, with a round that begins anew with it."""
    round_ = a_round(text)
    plain = Plan(rows=rows, batch_size=5, shards=2, seed=4)
    plan = PlanByPhase(rows=rows, batch_size=5, shards=2, seed=4, round=round_)
    expected = []
    for epoch in range(3):
        for batch in range(plain.steps_per_epoch):
            of_round = batch % round_.batches
            expected += [
                (epoch, name, plain.batch(epoch * plain.steps_per_epoch + batch).tolist())
                for name, take in zip(round_.phases, round_.takes, strict=True)
                if take == of_round
            ]
    made = [
        (plan.epoch(step), plan.phase(step), plan.batch(step).tolist())
        for step in range(3 * plan.steps_per_epoch)
    ]
    assert made == expected
    for name in set(text):
        per_epoch = sum(phase == name for _, phase, _ in expected) / 3
        assert plan.updates_of(name) == per_epoch
    for step, (_, _, rows_of) in enumerate(expected):
        assert plan.batch_rows(step) == len(rows_of)
        shards = [plan.shard(step, s).tolist() for s in range(plan.shards_of(step))]
        assert [row for shard in shards for row in shard] == rows_of


def test_a_phase_that_takes_new_batches_sees_each_row_once() -> None:
    plan = PlanByPhase(rows=47, batch_size=5, shards=2, round=a_round("ddg"))
    seen: Counter[int] = Counter()
    for step in range(plan.steps_per_epoch):
        if plan.phase(step) == "d":
            seen.update(plan.batch(step).tolist())
    assert seen == Counter(range(47))


def test_a_plan_is_told_to_another_process() -> None:
    plan = PlanByPhase(rows=47, batch_size=5, shards=2, seed=3, round=a_round("ddg"))
    again = from_json(json.loads(json.dumps(plan.to_json())))
    for step in range(40):
        assert again.phase(step) == plan.phase(step)
        assert again.batch(step).tolist() == plan.batch(step).tolist()


def test_an_epoch_that_is_too_short_for_a_round() -> None:
    with expect_error(SettingError, name="batch_size", got="5 of 5 rows"):
        PlanByPhase(rows=5, batch_size=5, shards=1, round=a_round("ddg"))
    PlanByPhase(rows=5, batch_size=5, shards=1, round=a_round("ddg", d=False))


def test_updates_of_a_phase_that_there_is_not() -> None:
    with expect_error(SettingError, name="phase", got="e"):
        PlanByPhase(rows=20, batch_size=5, shards=1, round=a_round("ddg")).updates_of("e")
    with expect_error(SettingError, name="phase", got="d"):
        Plan(rows=20, batch_size=5, shards=1).updates_of("d")
