"""Losses: workers that leave, with or without what they held; shards that fail or crash a worker.

Legend: V shards of a step, N workers. w0 is worker 0, and (2, 5) is shard 5 of step 2.
"""

from __future__ import annotations

from support.scripted import (
    ENDED,
    FREE,
    HOME,
    coordinator,
    handle_all,
    straggling,
)
from support.simulator import Simulation

from quorate.coordination.coordinator import Phase
from quorate.coordination.protocol import (
    Abort,
    Applied,
    Apply,
    Compute,
    Done,
    Failed,
    Finish,
    Joined,
    Keep,
    Left,
    Wake,
)


def test_a_worker_killed_while_computing_has_its_shard_dealt_again() -> None:
    c = coordinator(shards=2, joined=3)
    assert c.handle(Left(1, "killed"), 0.5) == [Compute(2, 0, 1, HOME)]


def test_a_shard_that_is_dealt_again_names_the_worker_that_left_with_it() -> None:
    c = coordinator(shards=4, steps=2, joined=2)
    handle_all(c, 1.0, Done(1, 0, 2))  # w1 goes on with shard 3
    c.handle(Left(1, "killed"), 1.5)
    dealt = [effect for n in range(3) for effect in c.handle(Done(0, 0, n), 2.0 + n)]
    lost_with = {e.shard: e.lost_with for e in dealt if isinstance(e, Compute)}
    assert lost_with == {1: None, 2: 1, 3: 1}
    c.handle(Done(0, 0, 3), 5.0)
    [again] = [e for e in c.handle(Applied(0), 6.0) if isinstance(e, Compute)]
    assert again.lost_with is None


def test_a_shard_waits_in_nobodys_hands_when_all_others_are_busy() -> None:
    c = coordinator(shards=2, joined=2)
    assert c.handle(Left(1, "killed"), 0.5) == []
    assert c.handle(Done(0, 0, 0), 1.0) == [Keep(0, 0, 0), Compute(0, 0, 1, HOME)]


def test_a_worker_killed_while_holding_shards_has_them_dealt_again() -> None:
    c = coordinator(shards=4, joined=2)
    handle_all(c, 1.0, Done(1, 0, 2))  # w1 goes on with shard 3
    assert c.handle(Left(1, "killed"), 1.5) == []
    assert c.handle(Done(0, 0, 0), 2.0) == [Keep(0, 0, 0), Compute(0, 0, 1, HOME)]
    assert c.handle(Done(0, 0, 1), 3.0) == [Keep(0, 0, 1), Compute(0, 0, 2, HOME)]
    assert c.handle(Done(0, 0, 2), 4.0) == [Keep(0, 0, 2), Compute(0, 0, 3, HOME)]
    assert c.handle(Done(0, 0, 3), 5.0) == [Keep(0, 0, 3), Apply(0, (0,))]


def test_a_holder_killed_during_the_update_has_its_shards_dealt_again() -> None:
    c = coordinator(shards=2, steps=2, joined=2)
    assert handle_all(c, 1.0, Done(0, 0, 0), Done(1, 0, 1))[-1] == Apply(0, (0, 1))
    assert c.handle(Left(1, "killed"), 1.5) == [Compute(0, 0, 1, HOME)]
    assert c.phase is Phase.COMPUTING
    assert c.handle(Done(0, 0, 1), 2.5) == [Keep(0, 0, 1), Apply(0, (0,))]
    assert c.handle(Applied(0), 3.0) == [Compute(0, 1, 0, HOME)]


def test_a_worker_that_holds_nothing_may_leave_during_the_update() -> None:
    c = coordinator(shards=1, steps=2, joined=2)
    c.handle(Done(0, 0, 0), 1.0)
    assert c.handle(Left(1, "killed"), 1.5) == []
    assert c.handle(Applied(0), 2.0) == [Compute(0, 1, 0, HOME)]


def test_a_late_copy_takes_the_place_of_one_that_was_lost_with_its_holder() -> None:
    c = straggling()
    handle_all(c, 11.5, Done(0, 1, 0))
    c.handle(Done(0, 1, 1), 12.0)  # w0 holds both, and w1 still computes its copy of (1, 1)
    assert c.handle(Left(0, "killed"), 12.0) == [Compute(2, 1, 0, FREE)]
    assert c.handle(Done(1, 1, 1), 12.25)[0] == Keep(1, 1, 1)
    assert c.handle(Done(2, 1, 0), 13.0) == [Keep(2, 1, 0), Apply(1, (1, 2))]


def test_a_run_that_all_workers_left_ends_with_a_new_one() -> None:
    run = Simulation(shards=3, steps=4)
    run.at(0.0, Joined(0), Joined(1))
    run.at(2.5, Left(0, "killed"))
    run.at(3.0, Left(1, "killed"))
    run.at(100.0, Joined(2))
    run.run()
    assert run.finish == Finish(4, ENDED)
    assert run.now == 100.0 + 3 * 3  # step 0 was applied before


def test_a_worker_that_is_back_under_its_old_number_begins_afresh() -> None:
    c = coordinator(shards=2, joined=2)
    c.handle(Left(0, "killed"), 0.5)
    assert c.handle(Joined(0), 1.0) == [Compute(0, 0, 0, HOME)]


def test_what_a_worker_held_counts_when_its_results_stay() -> None:
    c = coordinator(shards=4, joined=2)
    handle_all(c, 1.0, Done(1, 0, 2))  # w1 goes on with shard 3
    assert c.handle(Left(1, "killed", results_stay=True), 1.5) == []
    assert c.handle(Done(0, 0, 0), 2.0) == [Keep(0, 0, 0), Compute(0, 0, 1, HOME)]
    assert c.handle(Done(0, 0, 1), 3.0) == [Keep(0, 0, 1), Compute(0, 0, 3, HOME)]
    assert c.handle(Done(0, 0, 3), 4.0) == [Keep(0, 0, 3), Apply(0, (0, 1))]


def test_a_holder_whose_results_stay_may_leave_during_the_update() -> None:
    c = coordinator(shards=2, steps=2, joined=2)
    handle_all(c, 1.0, Done(0, 0, 0), Done(1, 0, 1))
    assert c.handle(Left(1, "killed", results_stay=True), 1.5) == []
    assert c.phase is Phase.APPLYING
    assert c.handle(Applied(0), 2.0) == [Compute(0, 1, 0, HOME)]


def test_a_worker_that_is_back_goes_on_where_its_results_stayed() -> None:
    c = coordinator(shards=2, joined=1)
    c.handle(Done(0, 0, 0), 1.0)
    assert c.handle(Left(0, "killed", results_stay=True), 1.5) == []
    assert c.handle(Joined(0), 2.0) == [Compute(0, 0, 1, HOME)]
    assert c.handle(Done(0, 0, 1), 3.0) == [Keep(0, 0, 1), Apply(0, (0,))]


def test_a_shard_that_failed_once_is_tried_on_another_worker_and_not_on_the_same() -> None:
    c = coordinator(shards=3, joined=2)  # w0 is at home in 0 and 1, w1 in 2
    assert c.handle(Failed(0, 0, 0), 1.0) == [Compute(0, 0, 1, HOME)]
    # It is idle now, and waits for w1 to be far behind rather than to try again.
    assert c.handle(Done(0, 0, 1), 5.0) == [Keep(0, 0, 1), Wake(6.0)]
    assert c.handle(Done(1, 0, 2), 5.5) == [Keep(1, 0, 2), Compute(1, 0, 0, FREE), Wake(13.75)]
    assert c.handle(Done(1, 0, 0), 6.5) == [Keep(1, 0, 0), Apply(0, (0, 1))]


def test_a_shard_that_failed_on_two_workers_ends_the_run() -> None:
    c = coordinator(shards=2, joined=3)
    assert c.handle(Failed(0, 0, 0), 1.0) == [Compute(2, 0, 0, FREE)]
    assert c.handle(Failed(2, 0, 0), 2.0) == [Abort(2, 0, 0)]
    assert c.phase is Phase.FINISHED


def test_a_failure_on_the_only_worker_ends_the_run_at_once() -> None:
    c = coordinator(shards=2, joined=1)
    assert c.handle(Failed(0, 0, 0), 1.0) == [Abort(0, 0, 0)]


def test_a_failure_on_every_worker_ends_the_run_before_all_attempts_are_made() -> None:
    c = coordinator(shards=2, joined=2, attempts=5)
    handle_all(c, 1.0, Failed(0, 0, 0), Done(1, 0, 1))
    assert c.handle(Failed(1, 0, 0), 2.0) == [Abort(1, 0, 0)]


def test_a_failure_of_a_copy_that_nobody_needs_changes_nothing() -> None:
    c = straggling()
    handle_all(c, 11.5, Done(0, 1, 0))
    handle_all(c, 12.0, Done(0, 1, 1))
    c.handle(Applied(1), 13.0)
    effects = c.handle(Failed(1, 1, 1), 13.5)
    assert not [e for e in effects if not isinstance(e, Wake)]


def test_a_failure_counts_in_its_step_only() -> None:
    c = coordinator(shards=1, steps=2, joined=2)
    c.handle(Failed(0, 0, 0), 1.0)
    c.handle(Done(1, 0, 0), 2.0)
    c.handle(Applied(0), 3.0)  # (1, 0) goes to w0
    assert c.handle(Failed(0, 1, 0), 4.0) == [Compute(1, 1, 0, FREE), Wake(5.5)]


def test_a_shard_is_tried_again_where_it_failed_when_nobody_else_is_left_to_try_it() -> None:
    c = coordinator(shards=1, joined=2)
    assert c.handle(Failed(0, 0, 0), 1.0) == [Compute(1, 0, 0, FREE)]
    assert [effect.worker for effect in c.handle(Left(1, "killed"), 2.0)] == [0]
    assert c.handle(Failed(0, 0, 0), 3.0) == [Abort(0, 0, 0)]


def test_a_shard_that_crashed_a_worker_is_tried_on_another_and_not_on_its_successor() -> None:
    c = coordinator(shards=2, joined=2)
    assert c.handle(Left(0, "SIGSEGV", crashed=True), 1.0) == []
    assert c.handle(Joined(0), 1.5) == []
    assert c.handle(Done(1, 0, 1), 2.0)[:2] == [Keep(1, 0, 1), Compute(1, 0, 0, FREE)]


def test_a_shard_that_crashed_two_workers_ends_the_run() -> None:
    c = coordinator(shards=2, joined=3)
    assert c.handle(Left(0, "SIGSEGV", crashed=True), 1.0) == [Compute(2, 0, 0, FREE)]
    assert c.handle(Left(2, "SIGSEGV", crashed=True), 2.0) == [Abort(2, 0, 0)]
    assert c.phase is Phase.FINISHED


def test_a_shard_that_crashed_the_only_worker_twice_ends_the_run() -> None:
    c = coordinator(shards=2, joined=1)
    assert c.handle(Left(0, "SIGSEGV", crashed=True), 1.0) == []
    assert c.handle(Joined(0), 2.0) == [Compute(0, 0, 0, HOME)]
    assert c.handle(Left(0, "SIGSEGV", crashed=True), 3.0) == [Abort(0, 0, 0)]


def test_a_crash_and_a_failure_of_a_shard_count_alike() -> None:
    c = coordinator(shards=2, joined=3)
    c.handle(Left(0, "SIGSEGV", crashed=True), 1.0)  # and w2 takes (0, 0)
    assert c.handle(Failed(2, 0, 0), 2.0) == [Abort(2, 0, 0)]


def test_a_worker_that_is_killed_is_no_failure_of_its_shard() -> None:
    c = coordinator(shards=1, joined=1, attempts=1)
    assert handle_all(c, 1.0, Left(0, "killed"), Joined(0)) == [Compute(0, 0, 0, HOME)]


def test_a_crash_with_idle_hands_or_over_a_copy_that_nobody_needs_is_no_failure() -> None:
    c = straggling(attempts=1)
    assert c.handle(Left(2, "SIGSEGV", crashed=True), 11.0) == []
    handle_all(c, 11.5, Done(0, 1, 0))  # and w0 takes the copy
    assert c.handle(Done(0, 1, 1), 12.5) == [Keep(0, 1, 1), Apply(1, (0,))]
    assert c.handle(Left(1, "SIGSEGV", crashed=True), 12.75) == []
    assert c.handle(Applied(1), 13.0) == [Compute(0, 2, 0, HOME)]
