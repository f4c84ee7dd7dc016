"""Shard times and stragglers, by hand numbers."""

from __future__ import annotations

import pytest

from quorate.coordination.protocol import Compute
from quorate.services.display.shard_time import WORK, ShardTime, duration, shard_time
from quorate.services.display.straggler import (
    LEAST_SHARDS,
    MOST_NAMED,
    CopiedShards,
    Slow,
    SlowWorkers,
    Stragglers,
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
    assert Stragglers(watched.slow_ones, CopiedShards()).summary() == (
        "slow workers: worker 2 (cuda:2) needed up to 0.29 s for a shard, 1.6 times the usual "
        "time, mostly in forward (in 119 of 119 measurements)"
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


def test_a_run_without_slow_workers_has_no_line_about_them() -> None:
    assert Stragglers.none().summary() is None


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


# --- shards that other workers compute too --------------------------------------------------------


def run_with_copies(own: int, copies: dict[str, int], usual_s: float | None) -> Stragglers:
    """A run of so many shards, of which worker 0 computed copies in the place of worker 1."""
    stragglers = Stragglers.none()
    counted = stragglers.copied_shards
    for step in range(own):
        counted.count(Compute(step % 2, step, 0, "", (0, step)), None, "training")
    for job, number in copies.items():
        for step in range(number):
            copy = Compute(0, step, 0, "worker 1 is slow", (1, step), instead_of=1)
            counted.count(copy, usual_s, job)
    return stragglers


def test_copies_are_counted_by_what_they_were_for() -> None:
    run = run_with_copies(2000, {"training": 1200, "validation": 1}, 0.0759)
    assert run.summary() == (
        "slow workers: worker 1 had 1,200 shards of training and 1 of validation computed by "
        "another worker too"
    )
    assert run_with_copies(4, {"predict()": 1, "evaluate()": 2}, 7.59).summary() == (
        "slow workers: worker 1 had 1 shard of predict() and 2 of evaluate() computed by "
        "another worker too"
    )


def test_both_reasons_to_call_a_worker_slow_stand_in_one_line() -> None:
    watched = Watched()
    watched.look(0.21, until=60)
    run = run_with_copies(100, {"training": 40}, 0.2)
    line = Stragglers(watched.slow_ones, run.copied_shards).summary()
    assert line is not None
    assert line.startswith("slow workers: worker 2 (cuda:2) needed up to 0.29 s for a shard, ")
    assert line.endswith(
        "; worker 1 (cuda:1) had 40 shards of training computed by another worker too"
    )


def test_few_copies_and_short_ones_are_not_named() -> None:
    """A shard is late now and then on any machine that has something else to do."""
    assert run_with_copies(1000, {"training": 19}, 0.1).summary() is None
    assert run_with_copies(1000, {"training": 20}, 0.1).summary() is not None
    assert run_with_copies(1000, {"training": 99}, 0.01).summary() is None
    assert run_with_copies(1000, {"training": 101}, 0.01).summary() is not None


def test_a_worker_that_was_slow_in_one_measurement_of_several_is_not_named() -> None:
    def summary_after(until: int) -> str | None:
        watched = Watched()
        watched.look(0.1, until=30)
        watched.look(0.3, until=until)
        watched.look(0.1, until=100)
        return Stragglers(watched.slow_ones, CopiedShards()).summary()

    assert summary_after(40) is None
    line = summary_after(45)
    assert line is not None
    assert line.endswith("(in 3 of 19 measurements)")


def test_a_worker_that_warms_up_is_not_slow() -> None:
    assert run_with_copies(1, {"training": 1}, None).summary() is None


def test_of_many_slow_workers_the_slowest_are_named() -> None:
    counted = CopiedShards()
    for worker in range(MOST_NAMED + 3):
        for step in range(worker + 1):
            copy = Compute(99, step, 0, "", (0, step), instead_of=worker)
            counted.count(copy, 1.0, "training")
    line = Stragglers(SlowWorkers(), counted).summary()
    assert line is not None
    assert line.startswith("slow workers: worker 6 had 7 shards of training computed by ")
    assert line.endswith("; and 3 more")
    assert line.count("worker ") == 2 * MOST_NAMED
