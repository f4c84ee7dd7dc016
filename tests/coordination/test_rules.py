"""The names of update rules, and what the coordinator has to know of them."""

from __future__ import annotations

import math

import pytest
from support.messages import expect_error

from quorate.coordination import rules
from quorate.coordination.rules import Async, Bounded, Quorum, Sync
from quorate.errors import SettingError


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("sync", Sync),
        (" sync ", Sync),
        ("quorum:1", Quorum),
        ("quorum:12", Quorum),
        ("async", Async),
        ("bounded:0", Bounded),
        ("bounded:4", Bounded),
    ],
)
def test_a_rule_has_the_name_that_it_is_asked_for_by(text: str, kind: type) -> None:
    rule = rules.parse(text)
    assert type(rule) is kind
    assert rule.name == text.strip()


def test_what_the_coordinator_has_to_know() -> None:
    named = {text: rules.parse(text) for text in ("sync", "quorum:3", "async", "bounded:2")}
    assert {n: [r.needed(v) for v in (1, 3, 5)] for n, r in named.items() if not r.by_shard} == {
        "sync": [1, 3, 5],
        "quorum:3": [1, 3, 3],  # all of a last batch that has fewer
    }
    assert {n: r.needed(1) for n, r in named.items() if r.by_shard} == {"async": 1, "bounded:2": 1}
    assert [rule.staleness for rule in named.values()] == [0, 0, math.inf, 2]
    assert [rule.copies for rule in named.values()] == [True, True, True, False]


@pytest.mark.parametrize(
    ("text", "shards", "keeps"),
    [
        ("sync", 4, True),
        ("quorum:4", 4, True),
        ("quorum:3", 4, False),
        ("async", 1, False),
        ("bounded:0", 1, False),
    ],
)
def test_a_rule_that_may_leave_something_out_or_reorder_does_not_keep_the_bits(
    text: str, shards: int, keeps: bool
) -> None:
    assert rules.keeps_bits(rules.parse(text), shards) is keeps


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Sync",
        "sync:1",
        "async:",
        "hogwild",
        "quorum",
        "bounded",
        "qurom:3",
        "bonded",
        "quorum:",
        "quorum:all",
        "quorum:2.5",
        "quorum:0",
        "quorum:-1",
        "bounded:3:4",
        "bounded:-1",
    ],
)
def test_another_text_is_a_mistake_in_one_line_that_names_all_rules(text: str) -> None:
    known = "sync, quorum:R, async, bounded:K"
    with expect_error(SettingError, name="update", got=text, expected=known) as caught:
        rules.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [None, 3, ["sync"]])
def test_what_is_not_a_text_is_a_mistake_too(value: object) -> None:
    with expect_error(SettingError, name="update"):
        rules.parse(value)  # type: ignore[arg-type]
