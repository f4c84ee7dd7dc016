"""Stops: what is under way is finished, nothing is begun, and a resume begins what was left open.

Legend: V shards of a step, N workers. w0 is worker 0, and (2, 5) is shard 5 of step 2.
"""

from __future__ import annotations

from support.scripted import (
    ENDED,
    HOME,
    by_shard,
    coordinator,
    handle_all,
    straggling,
)

from quorate.coordination.coordinator import Phase
from quorate.coordination.protocol import (
    Abort,
    Applied,
    Apply,
    Cancel,
    Compute,
    Discard,
    Done,
    Failed,
    Finish,
    Joined,
    Keep,
    Left,
    Stop,
    Tick,
)
from quorate.coordination.rules import Async


def test_a_stop_in_the_middle_of_a_step_finishes_that_step() -> None:
    c = coordinator(shards=2, steps=9, joined=1)
    assert c.handle(Stop("SIGTERM"), 0.5) == []
    assert c.handle(Done(0, 0, 0), 1.0) == [Keep(0, 0, 0), Compute(0, 0, 1, HOME)]
    assert c.handle(Done(0, 0, 1), 2.0) == [Keep(0, 0, 1), Apply(0, (0,))]
    assert c.handle(Applied(0), 3.0) == [Finish(1, "SIGTERM")]


def test_a_stop_during_an_update_ends_the_run_after_it() -> None:
    c = coordinator(shards=1, steps=9, joined=1)
    c.handle(Done(0, 0, 0), 1.0)
    assert c.handle(Stop("SIGTERM"), 1.5) == []
    assert c.handle(Applied(0), 2.0) == [Finish(1, "SIGTERM")]


def test_a_stop_before_anything_has_begun_ends_the_run_at_once() -> None:
    assert coordinator(shards=2, steps=9).handle(Stop("SIGTERM"), 0.0) == [Finish(0, "SIGTERM")]


def test_a_stop_when_all_of_a_step_was_lost_ends_the_run_at_once() -> None:
    c = coordinator(shards=2, steps=9, joined=1)
    handle_all(c, 1.0, Done(0, 0, 0), Left(0, "killed"))
    assert c.handle(Stop("SIGTERM"), 2.0) == [Finish(0, "SIGTERM")]


def test_the_reason_of_the_first_stop_counts() -> None:
    c = coordinator(shards=1, steps=9, joined=1)
    handle_all(c, 0.5, Stop("first"), Stop("second"))
    c.handle(Done(0, 0, 0), 1.0)
    assert c.handle(Applied(0), 2.0) == [Finish(1, "first")]


def test_what_comes_after_the_end_has_no_effect_but_on_results() -> None:
    c = straggling()
    handle_all(c, 11.5, Done(0, 1, 0), Stop("SIGTERM"))  # and w0 takes the copy
    c.handle(Done(0, 1, 1), 12.5)
    assert c.handle(Applied(1), 13.0) == [Cancel(1, 1, 1), Finish(2, "SIGTERM")]
    assert c.handle(Done(1, 1, 1), 14.0) == [Discard(1, 1, 1)]
    assert handle_all(c, 15.0, Left(1, "killed"), Joined(1), Stop("again"), Tick()) == []


# --- under rules that apply shards one by one -----------------------------------------------------


def test_a_checkpoint_in_the_middle_says_which_steps_are_open_and_a_resume_begins_them() -> None:
    c = by_shard(Async(), joined=3)
    handle_all(c, 1.0, Done(2, 2, 0), Applied(2))  # w0 and w1 compute 0 and 1, and w2 3
    assert (c.applied, c.left_open) == (1, [0, 1])
    handle_all(c, 1.0, Done(2, 3, 0), Applied(3), Done(0, 0, 0), Applied(0))
    assert (c.applied, c.left_open) == (3, [1])

    c = by_shard(Async(), steps=6, joined=0, first_step=1, left_open=[0, 1])
    assert [effect for worker in range(4) for effect in c.handle(Joined(worker), 0.0)] == [
        Compute(0, 0, 0, HOME),
        Compute(1, 1, 0, HOME),
        Compute(2, 3, 0, HOME),  # step 2 is made
        Compute(3, 4, 0, HOME),
    ]
    for worker, step in enumerate([0, 1, 3, 4]):
        handle_all(c, 1.0, Done(worker, step, 0), Applied(step))
    assert handle_all(c, 2.0, Done(0, 5, 0), Applied(5))[-1] == Finish(6, ENDED)


def test_a_stop_finishes_what_is_under_way_and_begins_nothing() -> None:
    c = by_shard(Async(), joined=3)
    assert c.handle(Stop("SIGTERM"), 0.5) == []
    for worker in (2, 0):
        assert c.handle(Done(worker, worker, 0), 1.0)[:2] == [
            Keep(worker, worker, 0),
            Apply(worker, (worker,)),
        ]
        c.handle(Applied(worker), 1.0)
    assert c.left_open == [1]
    c.handle(Done(1, 1, 0), 3.0)
    effects = c.handle(Applied(1), 3.0)
    assert effects[-1] == Finish(3, "SIGTERM")
    assert c.left_open == []


def test_a_step_that_nobody_has_any_more_is_left_open_by_a_stop() -> None:
    c = by_shard(Async(), joined=3)
    handle_all(c, 1.0, Done(2, 2, 0), Applied(2), Left(1, "killed"))
    # w0 computes 0, w2 3, and nobody 1.
    assert c.handle(Stop("SIGTERM"), 1.5) == []
    handle_all(c, 2.0, Done(0, 0, 0), Applied(0), Done(2, 3, 0))
    assert c.handle(Applied(3), 2.0) == [Finish(3, "SIGTERM")]
    assert c.left_open == [1]


def test_what_comes_after_an_abort_during_an_update_does_not_go_on_with_the_run() -> None:
    c = by_shard(Async(), joined=2)
    c.handle(Done(0, 0, 0), 1.0)  # its update is under way, and it goes on with 2
    c.handle(Failed(1, 1, 0), 1.0)
    assert handle_all(c, 1.0, Left(1, "killed"), Failed(0, 2, 0)) == [Abort(0, 2, 0)]
    assert c.handle(Left(0, "killed"), 2.0) == []
    assert c.phase is Phase.FINISHED
