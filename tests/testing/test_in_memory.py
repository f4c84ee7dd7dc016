"""Workers in memory: the bits of any other transport, and no events beyond the script's."""

from contextlib import nullcontext
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
    Done,
    Failed,
    Joined,
    Keep,
    Left,
    Replace,
)
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


def trained(workers: int = 2, script: Any = (), steps: int = 3, **options: Any) -> list[Any]:
    """Return the events of a training with workers in memory, and last the digest."""
    skips = options.pop("skips", False)
    trainer = small.trainer(None, workers, engine="towers", **options)
    with in_memory(script, skips=skips) as happened:
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
    assert len([keep for keep in of(happened, Keep) if keep.step == 0]) == 5  # a lost shard makes 5
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
    # Nobody else can take over: the worker is ended, and the next one computes the shard.
    happened = trained(1, [Hangs(0)])
    assert of(happened, Replace, Left, Joined)[1:] == [
        Replace(0, "no answer for 300 s"),
        Left(0, "no answer for 300 s", crashed=True),
        Joined(0),
    ]
    assert happened[-1] == on_towers


def test_a_quorum_leaves_out_who_is_late() -> None:
    script = [Finishes(2), Finishes(0), LeavesOff(1)]
    happened = trained(3, script, steps=1, update="quorum:2", shards=3)
    assert of(happened, Done) == [Done(2, 0, 1), Done(0, 0, 0)]
    assert of(happened, Cancel) == [Cancel(1, 0, 2)]
    # The worker answers after the end of the run: nobody waits for the answer.
    happened = trained(3, script, steps=2, update="quorum:2", shards=3)
    assert of(happened, Cancelled) == [Cancelled(1, 0, 2)]


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
    monkeypatch.setattr("quorate.testing.workers_in_memory.BLOCKS_S", 0.1)
    with pytest.raises(ScriptError, match=message):
        trained(2, script)


MOVES = [Finishes, LeavesOff, Leaves, Joins, Hangs]


@given(
    st.lists(
        st.builds(lambda kind, worker: kind(worker), st.sampled_from(MOVES), st.integers(0, 2)),
        max_size=30,
    )
)
@settings(max_examples=15, derandomize=True, deadline=None, database=None)
def test_whatever_happens_the_bits_are_the_same(on_towers: str, script: list[Move]) -> None:
    # Somebody is there at the end.
    happened = trained(3, [*script, Joins(0)], skips=True)
    assert happened[-1] == on_towers


def test_workers_follow_what_user_code_changes_of_the_model() -> None:
    digests: list[str] = []
    for workers in (nullcontext(), in_memory()):
        trainer = small.trainer(None, 2, engine="towers")
        with workers:
            for update in trainer.updates(small.DATA, steps=3):
                if update.global_step == 1:
                    next(trainer.model.parameters()).requires_grad_(False)
        digests.append(digest_of(trainer))
    assert digests[0] == digests[1]
