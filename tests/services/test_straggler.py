"""Shard times and stragglers, by hand numbers."""

from __future__ import annotations

import re

import pytest

from quorate.coordination.protocol import Compute
from quorate.services.display.shard_time import WORK, ShardTime, duration, shard_time
from quorate.services.display.straggler import (
    LEAST_SHARDS,
    OVER_S,
    CopiedShards,
    Slow,
    SlowWorkers,
    slow,
)
from quorate.transports.worker_status import PHASES, WorkerStatus


def status(
    number: int, shards: int, *, pid: int | None = 1, phase: str = "waiting", **seconds: float
) -> WorkerStatus:
    spent = {name: seconds.get(name, 0.0) for name in PHASES}
    return WorkerStatus(number, f"cuda:{number}", pid, None, phase, 0, 0, 0.0, spent, shards)


def after(number: int, shards: int, forward_s: float) -> WorkerStatus:
    """So many shards in the same time each: 0.08 s backward, 0.01 s pushing."""
    return status(
        number, shards, forward=forward_s * shards, backward=0.08 * shards, pushing=0.01 * shards
    )


def at(forward_s: float, backward_s: float = 0.08) -> ShardTime:
    phases_s = {"fetching": 0.0, "forward": forward_s, "backward": backward_s, "pushing": 0.01}
    return ShardTime(20, sum(phases_s.values()), phases_s, 0.1)


def test_a_shard_time_is_of_the_time_between_two_statuses() -> None:
    before = status(0, 4, starting=3.0, waiting=1.0, fetching=0.5, forward=2.0, backward=2.0)
    later = status(0, 8, starting=3.0, waiting=2.0, fetching=0.7, forward=3.0, backward=3.8)
    found = shard_time(before, later)
    assert found.shards == 4
    assert found.shard_s == pytest.approx((0.2 + 1.0 + 1.8) / 4)
    assert found.phases_s == pytest.approx(
        {"fetching": 0.05, "forward": 0.25, "backward": 0.45, "pushing": 0.0}
    )
    assert found.waiting == pytest.approx(0.25)


def test_a_shard_time_without_a_shard_or_without_any_time() -> None:
    idle = shard_time(status(0, 4, waiting=1.0), status(0, 4, waiting=3.0))
    assert idle == ShardTime(0, None, {}, 1.0)
    assert shard_time(None, status(0, 0, starting=2.0)) == ShardTime(0, None, {}, None)
    assert shard_time(None, status(0, 2, forward=1.0)).shard_s == 0.5


def test_the_median_of_three_or_more_counts_its_own() -> None:
    found = slow({0: at(0.10), 1: at(0.10), 2: at(0.22)})
    assert found == [
        Slow(2, (0, 1, 2), pytest.approx(0.31), pytest.approx(0.19), "forward", 0.22, 0.10)
    ]
    # Of five, two may be slow: the slowest comes first.
    five = slow({0: at(0.1), 1: at(0.3), 2: at(0.1), 3: at(0.1, 0.9), 4: at(0.1)})
    assert [(worker.worker, worker.phase) for worker in five] == [(3, "backward"), (1, "forward")]


def test_of_two_workers_one_is_compared_with_the_other() -> None:
    (found,) = slow({0: at(0.22), 1: at(0.10)})
    assert found[:2] == (0, (1,))
    assert found.usual_s == pytest.approx(0.19)


def test_from_1_3_times_on_a_worker_is_slow() -> None:
    def even(shard_s: float) -> ShardTime:
        return ShardTime(9, shard_s, dict.fromkeys(WORK, shard_s / 4), 0.0)

    assert slow({0: even(1.0), 1: even(1.0), 2: even(1.29)}) == []
    assert [found.worker for found in slow({0: even(1.0), 1: even(1.0), 2: even(1.3)})] == [2]


def test_nobody_to_compare_with() -> None:
    assert slow({}) == []
    assert slow({0: at(5.0)}) == []
    nothing = ShardTime(0, None, {}, 1.0)
    assert slow({0: at(5.0), 1: nothing}) == []
    assert slow({0: ShardTime(1, 0.0, {}, 0.0), 1: ShardTime(1, 0.0, {}, 0.0)}) == []


class Watched:
    """Three workers that are looked at every 5 s, of which the third takes a time of its own."""

    def __init__(self) -> None:
        self.slow_ones = SlowWorkers()
        self.said: dict[int, list[str]] = {}
        self._now = 0
        self._shards = 2
        self._forward_s = [0.2, 0.2, 0.2]

    def look(self, forward_s: float, *, until: int) -> None:
        for now in range(self._now, until, 5):
            self._shards += 20
            times = zip(self._forward_s, (0.1, 0.1, forward_s), strict=True)
            self._forward_s = [spent + 20 * each for spent, each in times]
            seen = [
                status(n, self._shards, forward=s, backward=0.08 * self._shards)
                for n, s in enumerate(self._forward_s)
            ]
            if lines := self.slow_ones.named(seen, now):
                self.said[now] = lines
        self._now = until


def test_a_slow_worker_is_named_once_with_its_phase() -> None:
    watched = Watched()
    watched.look(0.21, until=600)
    assert watched.said == {
        5: [
            "worker 2 (cuda:2) is slow: 0.29 s a shard, 1.6 times the median of 0.18 s; "
            "in forward: 0.21 s against 0.10 s"
        ]
    }
    assert watched.slow_ones.summary() == (
        "slow workers in all: worker 2 119 of 119 times, up to 1.6 times as long as usual"
    )


def test_it_is_named_again_when_it_is_twice_as_slow_and_when_it_is_over() -> None:
    watched = Watched()
    watched.look(0.21, until=100)
    watched.look(0.40, until=200)  # 2.7 times the others: not twice as slow
    watched.look(0.60, until=300)  # 3.8 times
    watched.look(0.10, until=500)
    assert [(now, line.split(":")[0]) for now, (line,) in watched.said.items()] == [
        (5, "worker 2 (cuda"),
        (200, "worker 2 (cuda"),
        (355, "worker 2 (cuda"),
    ]
    assert watched.said[355] == ["worker 2 (cuda:2) is no longer slow"]
    assert "3.8 times the median" in watched.said[200][0]


def test_one_that_is_slow_now_and_then_does_not_fill_the_log() -> None:
    watched = Watched()
    for minute in range(4):  # a busy machine: a few seconds slow, a few seconds not
        for part in range(0, 60, 20):
            watched.look(0.3, until=60 * minute + part + 10)
            watched.look(0.1, until=60 * minute + part + 20)
    assert len(watched.said) == 1
    for hour in range(5):  # two minutes of ten, for an hour
        watched.look(0.3, until=240 + 600 * hour + 120)
        watched.look(0.1, until=240 + 600 * hour + 600)
    lines = [line for lines in watched.said.values() for line in lines]
    assert len(lines) <= 2 * 4, lines


def test_nothing_is_summed_up_that_was_said() -> None:
    assert SlowWorkers().summary() is None
    assert CopiedShards({}.get).summary() is None


def test_of_two_the_line_names_the_other_one() -> None:
    slow_ones = SlowWorkers()
    assert slow_ones.named([after(0, 2, 0.1), after(1, 2, 3.1)], 0.0) == []
    assert slow_ones.named([after(0, 20, 0.1), after(1, 20, 3.1)], 5.0) == [
        "worker 1 (cuda:1) is slow: 3.19 s a shard, 16.8 times worker 0's 0.19 s; "
        "in forward: 3.10 s against 0.10 s"
    ]


def test_few_shards_say_nothing_but_add_up() -> None:
    slow_ones = SlowWorkers()
    counts = (2, 2 + LEAST_SHARDS // 2, 1 + LEAST_SHARDS, 2 + LEAST_SHARDS)
    said = [slow_ones.named([after(0, n, 0.1), after(1, n, 0.5)], 0.0) for n in counts]
    assert [len(lines) for lines in said] == [0, 0, 0, 1]


def test_a_worker_that_begins_is_warming_up() -> None:
    """The first shard after each start counts for nothing, and a worker that is gone neither."""
    slow_ones = SlowWorkers()
    steady = [after(0, n, 0.1) for n in (1, 20, 40, 60, 80)]
    warm_s = 60.0

    def other(shards: int, starts: int) -> WorkerStatus:
        return status(1, shards, forward=0.1 * shards + warm_s * starts, backward=0.08 * shards)

    said = [
        slow_ones.named([steady[0], other(1, 1)], 0.0),
        slow_ones.named([steady[1], other(20, 1)], 5.0),
        slow_ones.named([steady[2], other(40, 1)], 10.0),
        slow_ones.named([steady[3], other(40, 1)._replace(phase="starting")], 15.0),
        slow_ones.named([steady[3], other(41, 1)], 20.0),  # in its first shard again
        slow_ones.named([steady[3], other(45, 2)], 25.0),
        slow_ones.named([steady[4], other(60, 2)], 30.0),
    ]
    assert said == [[]] * 7
    gone = other(99, 9)._replace(pid=None)
    assert slow_ones.named([steady[4], gone], 35.0) == []


def test_durations_are_short() -> None:
    assert [duration(s) for s in (0.0031, 0.31, 3.14159, 31.4, 1234.5)] == [
        "3.1 ms",
        "0.31 s",
        "3.14 s",
        "31 s",
        "1,234 s",
    ]


# --- shards that others compute too ---------------------------------------------------------------


def test_a_worker_whose_shards_are_copied_is_named_once() -> None:
    usual_s = {0: 0.104, 1: 0.0759}
    copied_shards = CopiedShards(usual_s.get)
    task = Compute(0, 9, 3, "worker 1 is slow: far behind its usual time", (0, 1), instead_of=1)
    assert copied_shards.named(task, 7.0) == (
        "worker 1 is slow: far behind its usual time; worker 0 computes shard 3 of step 9 too "
        "(a shard usually takes worker 1 75.9 ms, worker 0 0.10 s)"
    )
    assert copied_shards.summary() is None
    for now in range(8, 600):
        assert copied_shards.named(task, now) is None
    usual_s[1] *= 2
    line = copied_shards.named(task, 600.0)
    assert line is not None
    assert line.endswith("(a shard usually takes worker 1 0.15 s, worker 0 0.10 s)")
    own = Compute(1, 10, 3, "", (1, 2))
    assert copied_shards.named(own, 599.0 + OVER_S) is None
    assert copied_shards.named(own, 600.0 + OVER_S) == (
        "worker 1 is no longer slow: it computes its shards alone again"
    )
    assert copied_shards.named(own, 601.0 + OVER_S) is None
    assert copied_shards.summary() == (
        "shards that another worker computed too, as theirs was slow: 594 of worker 1's"
    )


def test_copies_of_shards_of_milliseconds_are_counted_and_not_said() -> None:
    copied_shards = CopiedShards({0: 0.0104, 1: 0.0499}.get)
    task = Compute(0, 9, 3, "worker 1 is slow: far behind its usual time", (0, 1), instead_of=1)
    assert [copied_shards.named(task, now) for now in (7.0, 8.0)] == [None, None]
    assert copied_shards.named(Compute(1, 10, 3, "", (1, 2)), 9.0 + OVER_S) is None
    assert copied_shards.summary() == (
        "shards that another worker computed too, as theirs was slow: 2 of worker 1's"
    )


def test_the_time_of_a_worker_that_is_new_is_left_out() -> None:
    task = Compute(0, 9, 3, "worker 1 is slow: far behind its usual time", (0, 1), instead_of=1)
    of_evaluation = CopiedShards({1: 0.0759}.get, "the evaluation").named(task, 7.0)
    assert of_evaluation is not None
    assert re.search(r" computes shard \d+ of step \d+ of the evaluation too \(", of_evaluation)
    line = CopiedShards({1: 0.0759}.get).named(task, 7.0)
    assert line is not None
    assert line.endswith("(a shard usually takes worker 1 75.9 ms)")


def test_nobody_is_named_for_a_task_of_its_own_or_while_it_warms_up() -> None:
    assert CopiedShards({1: 1.0}.get).named(Compute(0, 9, 3, "", (0, 1)), 0.0) is None
    task = Compute(0, 9, 3, "worker 1 is slow: far behind its usual time", (0, 1), instead_of=1)
    assert CopiedShards({0: 1.0}.get).named(task, 0.0) is None
