"""The tally: each shard of each worker counts once, also over a resume."""

from __future__ import annotations

import json

from quorate.coordination.tally import Tally


def test_a_tally_counts_each_shard_of_each_worker_once() -> None:
    tally = Tally()
    tally.applied(0, 0)
    tally.applied(2, 3)
    tally.applied(2, 1)
    tally.lost(2, dropped=True)
    tally.lost(2, dropped=False)
    assert tally.to_json() == {
        "fresh": [1, 0, 0],
        "stale": [0, 0, 2],
        "dropped": [0, 0, 1],
        "copies": [0, 0, 1],
        "staleness": [4, 3],
    }
    assert [tally.of(worker).begun for worker in range(3)] == [1, 0, 4]


def test_a_tally_says_in_a_line_how_stale_and_whose_were_dropped() -> None:
    tally = Tally()
    assert tally.summary() == "staleness: mean 0.0, max 0; dropped: none"
    for staleness in (0, 1, 5):
        tally.applied(1, staleness)
    assert tally.summary() == "staleness: mean 2.0, max 5; dropped: none"
    for _ in range(1234):
        tally.lost(0, dropped=True)
        tally.lost(2, dropped=False)  # a copy is nobody's loss
    tally.lost(1, dropped=True)
    assert tally.summary() == (
        "staleness: mean 2.0, max 5; dropped: worker 0: 1,234 of 1,234, worker 1: 1 of 4"
    )


def test_a_tally_goes_on_where_a_saved_one_ended() -> None:
    tally = Tally()
    tally.applied(1, 2)
    tally.lost(0, dropped=True)
    saved = json.loads(json.dumps(tally.to_json()))
    again = Tally(saved)
    assert again.to_json() == tally.to_json()
    assert again.summary() == tally.summary()
    for each in (tally, again):
        each.applied(4, 7)
    assert again.to_json() == tally.to_json()
    assert Tally(Tally().to_json()).to_json() == Tally().to_json()
