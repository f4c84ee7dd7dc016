"""What is running, asked in every order, is what looking at all of it would find."""

from __future__ import annotations

import random
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.histories import fixed

from quorate.coordination.members import Members, Task
from quorate.coordination.running import Running, Who

PATIENCE = 1.5


def started(members: Members, worker: int, step: int, now: float, usual_s: float | None) -> Task:
    task = Task(worker, step, 0, 0, now, usual_s=usual_s)
    members.give(worker, task)
    return task


@pytest.mark.parametrize("is_ranked", [False, True])  # whether somebody asks for the k-th
@given(st.integers(0, 10_000))
@fixed(25)
def test_running_is_what_looking_at_all_would_find(is_ranked: bool, seed: int) -> None:
    chance = random.Random(seed)
    members = Members()
    running = Running(members, PATIENCE)
    running.is_asked = True
    tasks = dict[int, Task]()  # by worker
    for worker in range(12):
        members.join(worker)
    now = 0.0
    for step in range(200):  # enough of them that those that are gone are cleared away
        worker = chance.randrange(12)
        if (task := tasks.pop(worker, None)) is not None:
            running.drop(task.step, task.shard)
            members.end(worker)
        else:
            usual_s = chance.choice([1.0, 2.0, chance.uniform(0.5, 4.0)])
            tasks[worker] = started(members, worker, step, now, usual_s)
            running.put(tasks[worker], range(1))
        now += chance.choice([0.0, 0.1, chance.random()])
        running.advance(now)
        known = sorted(
            (t.since + t.usual_s, t.since + PATIENCE * t.usual_s, Who(t.worker, t.step, 0))
            for t in tasks.values()
            if t.usual_s is not None
        )
        behind = sorted((at, who) for _, at, who in known if at <= now)
        on_time = [each for each in known if each[1] > now]
        done_s = now + chance.uniform(0.0, 4.0)
        last_s = on_time[-1][0] if on_time else -inf
        assert running.may_help(now, done_s) == (bool(behind) or last_s > done_s)
        assert running.not_behind(now) == len(on_time)
        assert [*running.behind(now)] == [who for _, who in behind]
        assert running.next_behind_at(now) == min((at for _, at, _ in on_time), default=inf)
        downward = [(done_at, who) for done_at, _, who in reversed(on_time)]
        assert [*running.last_to_be_done(now)] == downward
        if is_ranked:
            k = chance.randrange(12)
            expected = on_time[k][0] if k < len(on_time) else inf
            assert running.expected_at(k, now) == expected
            first = downward[max(0, len(downward) - k) :]
            assert [*running.last_to_be_done(now, k)] == first
