"""The coordinator keeps orders and indexes; one that looks through all must decide the same.

The latter is ``support.plain``. Every effect of every event is compared, and the books after it.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.both import Both
from support.histories import KINDS, History, fixed, histories
from support.plain.members import Members as PlainMembers

from quorate.coordination.members import Members, Task
from quorate.coordination.todo import Todo

MANY = 40  # workers
EACH = int(os.environ.get("QUORATE_TEST_HISTORIES", "100"))  # of each rule; 500 take ten minutes


def decide_alike(kind: str, examples: int, most: int) -> None:
    effects = 0

    @given(histories([kind], most=most))
    @fixed(examples)
    def check(history: History) -> None:
        nonlocal effects
        run = history.simulation(coordinator=Both)
        run.run()  # raises DifferError, or InvariantError
        assert isinstance(run.coordinator, Both)
        effects += run.coordinator.compared

    check()
    assert effects > 10 * examples


@pytest.mark.parametrize("kind", KINDS)
def test_both_decide_alike_in_any_order_of_events(kind: str) -> None:
    decide_alike(kind, 40, 12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_both_decide_alike_in_histories_of_forty_workers(kind: str) -> None:
    decide_alike(kind, EACH, MANY)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 29), st.sampled_from("aab")), max_size=60))
@fixed(150)
def test_ranks_are_those_of_sorted_workers(moves: list[tuple[bool, int, str]]) -> None:
    ours, plain = Members(), PlainMembers()
    for joins, worker, letter in moves:
        place = "" if worker % 5 == 0 else letter
        if joins and worker not in ours.by_number:
            ours.join(worker, place)
            plain.join(worker, place)
        elif not joins and worker in ours.by_number:
            ours.leave(worker)
            plain.leave(worker)
        assert {w: ours.rank_of(w) for w in ours.numbers} == plain.ranks()
        assert ours.numbers == plain.numbers


@given(st.integers(0, 10_000), st.sampled_from([1.0, 0.1]))
@fixed(150)
def test_what_is_known_of_members_is_what_looking_at_all_would_find(
    seed: int, how_often: float
) -> None:
    chance = random.Random(seed)
    ours, plain = Members(timeout_s=5.0), PlainMembers()
    for now in range(100):
        worker = chance.randrange(8)
        member = ours.by_number.get(worker)
        if member is None:
            ours.join(worker)
            plain.join(worker)
        elif chance.random() < 0.1:
            ours.leave(worker)
            plain.leave(worker)
        elif member.task is None and not member.is_replaced:
            task = Task(worker, 0, now, 0, float(now), usual_s=member.usual_s)
            ours.give(worker, task)
            plain[worker].task = task  # type: ignore[assignment]
        elif member.task is not None and chance.random() < 0.2:
            ours.replace(worker)
            plain[worker].is_replaced = True
        elif member.task is not None:
            took_s = chance.choice([1.0, 2.0, 7.5])
            ours.end(worker)
            plain[worker].task = None
            ours.learn(worker, took_s)
            plain[worker].learn(took_s)
        if chance.random() >= how_often:  # what nobody asks for is not kept in order
            continue
        idle = plain.idle()
        known = [usual_s for w in idle if (usual_s := plain[w].usual_s) is not None]
        found = ours.usual_s_of_idle
        assert ours.idle == idle
        assert ours.usual_s_of_all == plain.usual_s_of_all()
        assert (None in found) == (len(known) < len(idle))
        assert [s for s in found if s is not None] == ([min(known), max(known)] if known else [])
        silent = sorted(plain.silent(5.0))
        assert ours.silent_at == (silent[0][0] if silent else float("inf"))


def test_those_who_are_silent_come_in_order_and_once() -> None:
    members = Members(timeout_s=2.0)
    for worker in (2, 0, 1):
        members.join(worker)
        members.give(worker, Task(worker, 0, worker, 0, 0.0))
    members.replace(1)
    assert members.silent(1.9) == []
    assert [worker for worker, _ in members.silent(2.0)] == [0, 2]


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 39)), max_size=80))
@fixed(200)
def test_what_is_to_do_is_a_set(shards: int, moves: list[tuple[bool, int]]) -> None:
    todo, model = Todo(shards), set(range(shards))
    for takes, shard in moves:
        if takes and shard in model:
            stop = next(s for s in range(shard, shards + 1) if s not in model)
            assert todo.stop_of(shard) == stop
            taken = range(shard, shard + 1 + (stop - shard) // 3)
            todo.take(taken)
            model -= {*taken}
        elif not takes and shard < shards:
            todo.add([shard])
            model.add(shard)
        assert [*todo] == sorted(model)
        assert len(todo) == len(model)
        assert (shard in todo) == (shard in model)
        within = range(shard // 2, shard)
        both = model & {*within}
        begins = min(both, default=shard)
        run = range(begins, next(s for s in range(begins, shard + 1) if s not in both))
        assert todo.first_in(within) == (run or None)
        if model:
            runs = [s for s in sorted(model) if s - 1 not in model]
            lengths = {s: next(n for n in range(1, 42) if s + n not in model) for s in runs}
            first = max(runs, key=lambda s: lengths[s])
            assert todo.longest() == range(first, first + lengths[first])
