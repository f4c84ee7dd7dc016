"""The names of update rules, the rules as the coordinator sees them, and the tally of shards."""

import json
import math
from typing import Any

import pytest
from support.messages import expect_error

from quorate.coordination import rules
from quorate.coordination.tally import Tally
from quorate.errors import SettingError


@pytest.mark.parametrize(
    ("text", "needed", "staleness", "copies"),
    [
        ("sync", [1, 3, 5], 0, True),
        (" sync ", [1, 3, 5], 0, True),
        ("quorum:3", [1, 3, 3], 0, True),  # all shards of a smaller last batch
        ("quorum:12", [1, 3, 5], 0, True),
        ("async", [1], math.inf, True),
        ("bounded:0", [1], 0, False),
        ("bounded:2", [1], 2, False),
    ],
)
def test_what_the_coordinator_knows_of_a_rule(
    text: str, needed: list[int], staleness: float, copies: bool
) -> None:
    rule = rules.parse(text)
    assert rule.name == text.strip()
    assert rule.by_shard == (len(needed) == 1)
    shards = (1, 3, 5)[: len(needed)]
    assert ([rule.needed(v) for v in shards], rule.staleness) == (needed, staleness)
    assert rule.copies is copies


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
        *("", "Sync", "sync:1", "async:", "hogwild", "quorum", "bounded", "qurom:3", "bonded"),
        *("quorum:", "quorum:all", "quorum:2.5", "quorum:0", "quorum:-1"),
        *("bounded:3:4", "bounded:-1", None, 3, ["sync"]),
    ],
)
def test_something_else_is_a_mistake_in_one_line_that_names_all_rules(text: Any) -> None:
    known = "sync, quorum:R, async, bounded:K"
    with expect_error(SettingError, name="update", got=text, expected=known) as caught:
        rules.parse(text)
    assert "\n" not in str(caught.value)


def test_a_tally_counts_each_shard_of_each_worker_once_also_over_a_resume() -> None:
    tally = Tally()
    assert Tally(tally.to_json()).to_json() == tally.to_json()
    assert tally.summary() == "staleness: mean 0.0, max 0; dropped: none"
    for worker, staleness in ((0, 0), (2, 3), (2, 1)):
        tally.applied(worker, staleness)
    tally = Tally(json.loads(json.dumps(tally.to_json())))
    for _ in range(1234):
        tally.lost(1, dropped=True)
    tally.lost(2, dropped=True)
    tally.lost(2, dropped=False)  # a copy is nobody's loss
    assert tally.to_json() == {
        "fresh": [1, 0, 0],
        "stale": [0, 0, 2],
        "dropped": [0, 1234, 1],
        "copies": [0, 0, 1],
        "staleness": [4, 3],
    }
    assert tally.summary() == (
        "staleness: mean 1.3, max 3; dropped: worker 1: 1,234 of 1,234, worker 2: 1 of 4"
    )
