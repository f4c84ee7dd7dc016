"""Workers in memory: the bits of any other transport, and only what a script says happens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import small
from support.digests import digest_of

from quorate.coordination.protocol import (
    Cancel,
    Cancelled,
    Compute,
    Discard,
    Done,
    Failed,
    Joined,
    Keep,
    Left,
    Replace,
)
from quorate.errors import SettingError
from quorate.testing import (
    Fails,
    Finishes,
    Hangs,
    Joins,
    Leaves,
    LeavesOff,
    Move,
    ScriptError,
    in_memory,
)
from quorate.training.observer import observed


def trained(workers: int = 2, script: Any = (), steps: int = 3, **options: Any) -> list[Any]:
    """What happened in a training with workers in memory, and last its digest."""
    times = {name: options.pop(name) for name in ("time_s", "skips") if name in options}
    trainer = small.trainer(None, workers, engine="towers", **options)
    with in_memory(script, **times) as happened:
        for _ in trainer.updates(small.DATA, steps=steps):
            pass
    return [*happened, digest_of(trainer)]


@pytest.fixture(scope="module")
def on_towers() -> str:
    trainer = small.trainer(None, 3, engine="towers")
    for _ in trainer.updates(small.DATA, steps=3):
        pass
    return digest_of(trainer)


def of(happened: list[Any], *kinds: type) -> list[Any]:
    return [entry for entry in happened if isinstance(entry, kinds)]


def test_the_bits_are_those_of_towers(on_towers: str) -> None:
    for workers in (1, 3):
        assert trained(workers)[-1] == on_towers


def test_without_a_script_nothing_unusual_happens() -> None:
    happened = trained(2, steps=1)
    assert [event.worker for event in of(happened, Joined)] == [0, 1]
    assert of(happened, Done) == [Done(0, 0, 0), Done(1, 0, 2), Done(0, 0, 1), Done(1, 0, 3)]
    assert not of(happened, Discard, Cancel, Left, Replace)


def test_a_script_says_who_is_when_done(on_towers: str) -> None:
    script = [Finishes(1), Finishes(1), Finishes(0), Finishes(1)]
    happened = trained(2, script)
    assert of(happened, Done)[:4] == [Done(1, 0, 2), Done(1, 0, 3), Done(0, 0, 0), Done(1, 0, 1)]
    assert happened[-1] == on_towers


def test_who_leaves_takes_along_what_it_held_and_may_be_back(on_towers: str) -> None:
    script = [Finishes(0), Leaves(0), Finishes(1), Finishes(1), Joins(0)]
    happened = trained(2, script)
    assert of(happened, Left) == [Left(0, "as the script says")]
    assert of(happened, Keep)[:2] == [Keep(0, 0, 0), Keep(1, 0, 2)]
    assert len([keep for keep in of(happened, Keep) if keep.step == 0]) == 5  # one was lost
    assert happened[-1] == on_towers


def test_what_stays_of_who_leaves_is_not_computed_again(on_towers: str) -> None:
    happened = trained(2, [Finishes(0), Leaves(0, results_stay=True), Finishes(1), Joins(0)])
    assert len([keep for keep in of(happened, Keep) if keep.step == 0]) == 4
    assert happened[-1] == on_towers


def test_who_joins_late_was_not_there(on_towers: str) -> None:
    happened = trained(3, [Finishes(0), Joins(2), Finishes(2)])
    assert happened[:3] == [Joined(0), Compute(0, 0, 0, "home shard"), Joined(1)]
    assert of(happened, Joined)[-1] == Joined(2)
    assert happened[-1] == on_towers


def test_what_user_code_raises_is_tried_elsewhere_and_then_reaches_the_caller(
    on_towers: str,
) -> None:
    happened = trained(2, [Fails(0)])
    assert of(happened, Failed) == [Failed(0, 0, 0)]
    assert happened[-1] == on_towers
    with pytest.raises(ZeroDivisionError) as caught:
        trained(2, [Fails(0), Finishes(1), Finishes(1), Fails(1, ZeroDivisionError())])
    assert "worker 1 (cpu), step 0, shard 0" in caught.value.__notes__[-1]


def test_who_hangs_is_copied_told_and_replaced(on_towers: str) -> None:
    happened = trained(2, [Finishes(0), Finishes(1), Hangs(1)], steps=3)
    [cancel] = of(happened, Cancel)
    copies = [c for c in of(happened, Compute) if c.instead_of == 1]
    assert (copies[0].step, copies[0].shard) == (cancel.step, cancel.shard)
    assert happened[-1] == on_towers
    # Alone, nobody can take its shard over: it is ended, and the next one computes it.
    happened = trained(1, [Hangs(0)])
    assert of(happened, Replace, Left, Joined)[1:] == [
        Replace(0, "no answer for 300 s"),
        Left(0, "no answer for 300 s", crashed=True),
        Joined(0),
    ]
    assert happened[-1] == on_towers


def test_time_decides_about_copies_and_passes_at_once(on_towers: str) -> None:
    happened = trained(2, time_s=lambda worker, step, shard: 1e6 if worker else 1.0)
    assert {copy.reason for copy in of(happened, Compute)} >= {
        "worker 1 is slow: far behind its usual time"
    }
    assert happened[-1] == on_towers


def test_a_quorum_leaves_out_who_is_late() -> None:
    script = [Finishes(2), Finishes(0), LeavesOff(1)]
    happened = trained(3, script, steps=1, update="quorum:2", shards=3)
    assert of(happened, Done) == [Done(2, 0, 1), Done(0, 0, 0)]
    assert of(happened, Cancel) == [Cancel(1, 0, 2)]
    # It answers after the end of the run, which nobody waits for.
    happened = trained(3, script, steps=2, update="quorum:2", shards=3)
    assert of(happened, Cancelled) == [Cancelled(1, 0, 2)]


def test_a_gradient_is_as_stale_as_the_script_makes_it() -> None:
    happened = trained(2, [*[Finishes(0)] * 3, Finishes(1)], steps=4, update="async")
    assert [done.worker for done in of(happened, Done)] == [0, 0, 0, 1]
    [late] = [keep for keep in of(happened, Keep) if keep.worker == 1]
    assert late == of(happened, Keep)[3]


def test_asynchronous_runs_of_one_script_have_the_same_bits() -> None:
    script = [Finishes(0), Finishes(2), Leaves(1), Finishes(0), Joins(1), Finishes(1), Finishes(2)]
    options: dict[str, Any] = {"update": "async", "steps": 12}
    first, again = (trained(3, script, **options) for _ in range(2))
    assert first == again
    assert trained(3, script[::-1], skips=True, **options)[-1] != first[-1]


def test_an_evaluation_in_between_is_computed_by_the_same_workers() -> None:
    trainer = small.trainer(None, 2, engine="towers")
    with in_memory([Finishes(1)]):
        updates = trainer.updates(small.DATA, steps=2)
        next(updates)
        between = trainer.evaluate(small.DATA)
        updates.close()
    assert trainer.evaluate(small.DATA) == between


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([Finishes(7)], r"Finishes\(worker=7\): there are workers 0 to 1"),
        ([Leaves(0), Leaves(0)], "is impossible: worker 1 has shard 2 of step 0; absent: .0."),
        ([Finishes(0), Joins(0)], "is impossible: .*; absent: nobody"),
        (
            [Leaves(0), Leaves(1)],
            "nothing will happen any more: nobody has a shard; absent: .0, 1.",
        ),
    ],
)
def test_a_script_that_cannot_be_played_is_a_mistake(
    script: list[Move], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quorate.testing.channel.BLOCKS_S", 0.1)
    with pytest.raises(ScriptError, match=message):
        trained(2, script)


def test_it_takes_the_place_of_towers_alone() -> None:
    class Others:
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    others: Any = Others()
    state: Any = None
    with in_memory(), pytest.raises(SettingError, match="engine: got 'processes', expected towers"):
        observed(others, state, {"engine": "processes"})
    assert others.is_closed


MOVES = [Finishes, LeavesOff, Leaves, Joins, Hangs]


@given(
    st.lists(
        st.builds(lambda kind, worker: kind(worker), st.sampled_from(MOVES), st.integers(0, 2)),
        max_size=30,
    )
)
@settings(max_examples=25, derandomize=True, deadline=None, database=None)
def test_whatever_happens_the_bits_are_the_same(on_towers: str, script: list[Move]) -> None:
    # Somebody is there at the end.
    happened = trained(3, [*script, Joins(0)], skips=True)
    assert happened[-1] == on_towers
