"""Stragglers: the one voice that calls a worker slow, at most once a minute for each reason.

There are two reasons. A worker's shards take it much longer than others need for theirs, which the
display sees in the times of workers; and another worker computes a shard too that it has had for
long, which the coordinator decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from statistics import median
from typing import NamedTuple

from quorate.coordination.protocol import Compute
from quorate.services.display.shard_time import WORK, ShardTime, duration, shard_time
from quorate.transports.worker_status import WorkerStatus

FACTOR = 1.3  # times the others' shard time
# Over fewer shards a time may be off by a tenth and more, and a steady worker look slow.
LEAST_SHARDS = 10
EVERY_S = 60.0  # between two lines about one worker


class Slow(NamedTuple):
    """A worker that is slow, and what it was compared with; times per shard."""

    worker: int
    compared: tuple[int, ...]  # with the median of these
    shard_s: float
    usual_s: float
    phase: str  # in which it loses most
    phase_s: float
    usual_phase_s: float


def slow(times: Mapping[int, ShardTime]) -> list[Slow]:
    """List who takes ``FACTOR`` times as long as usual, the slowest first.

    Usual is the median of all workers, or with two of them the time of the other one.
    """
    known = {w: time.shard_s for w, time in times.items() if time.shard_s is not None}
    slow_workers = []
    for worker, shard_s in known.items():
        compared = tuple(w for w in known if len(known) > 2 or w != worker)
        usual_s = median(known[w] for w in compared) if compared else inf
        if not 0 < FACTOR * usual_s <= shard_s:
            continue
        own = times[worker].phases_s
        usual = {phase: median(times[w].phases_s[phase] for w in compared) for phase in WORK}
        phase = max(WORK, key=lambda name: own[name] - usual[name])
        slow_workers.append(
            Slow(worker, compared, shard_s, usual_s, phase, own[phase], usual[phase])
        )
    return sorted(slow_workers, key=lambda worker: -worker.shard_s)


class _Pauses:
    """Remembers when a worker was named last."""

    def __init__(self) -> None:
        self._named_at: dict[int, float] = {}

    def are_over(self, worker: int, now: float) -> bool:
        """Whether this worker may be named now; if so, it is taken to be."""
        if now - self._named_at.get(worker, -inf) < EVERY_S:
            return False
        self._named_at[worker] = now
        return True


class SlowWorkers:
    """Watches the times of all workers, and names those that are slow.

    A worker's time is taken over ``LEAST_SHARDS`` shards or more, and not over its first one after
    a start. One thread.
    """

    def __init__(self) -> None:
        self._first: dict[int, int] = {}  # worker -> how many shards it had begun at its start
        self._since: dict[int, WorkerStatus] = {}  # worker -> what its next time is taken from
        self._times: dict[int, ShardTime] = {}
        self._pauses = _Pauses()

    def named(self, workers: Sequence[WorkerStatus], now: float) -> list[str]:
        """Return the lines to show, if any.

        Args:
            now: seconds on any clock.
        """
        devices = {status.number: status.device for status in workers}
        news = {status.number for status in workers if self._learns(status)}
        return [
            described(worker, devices[worker.worker])
            for worker in slow(self._times)
            if worker.worker in news and self._pauses.are_over(worker.worker, now)
        ]

    def _learns(self, status: WorkerStatus) -> bool:
        """Take note of a status; whether a new time of this worker is known."""
        number = status.number
        if status.is_gone or status.phase == "starting":
            self._first[number] = status.shards
            self._since.pop(number, None)
            self._times.pop(number, None)
            return False
        if status.shards <= self._first.get(number, 0) + 1:
            return False  # its first shard: it is warming up
        since = self._since.setdefault(number, status)
        if status.shards - since.shards < LEAST_SHARDS:
            return False
        self._times[number] = shard_time(since, status)
        self._since[number] = status
        return True


class CopiedShards:
    """Names workers whose shards others compute too. One thread.

    Args:
        usual_s: seconds that a shard usually takes a worker; None where that is not known yet.
    """

    def __init__(self, usual_s: Callable[[int], float | None]) -> None:
        self._usual_s = usual_s
        self._pauses = _Pauses()

    def named(self, task: Compute, now: float) -> str | None:
        """Return the line to show about a task that a worker is given, if any.

        Args:
            now: seconds on any clock.
        """
        if task.instead_of is None:
            return None
        shard_s = self._usual_s(task.instead_of)
        if shard_s is None:  # its first shard: it is warming up
            return None
        if not self._pauses.are_over(task.instead_of, now):
            return None
        times = f"worker {task.instead_of} {duration(shard_s)}"
        if (usual_s := self._usual_s(task.worker)) is not None:
            times += f", worker {task.worker} {duration(usual_s)}"
        return (
            f"{task.reason}; worker {task.worker} computes shard {task.shard} of step {task.step} "
            f"too (a shard usually takes {times})"
        )


def described(worker: Slow, device: str) -> str:
    """``worker 1 (cpu) is slow: 31 ms a shard, 2.0 times worker 0's 15 ms; in forward: ...``."""
    usual = f"the median of {duration(worker.usual_s)}"
    if len(worker.compared) == 1:
        usual = f"worker {worker.compared[0]}'s {duration(worker.usual_s)}"
    return (
        f"worker {worker.worker} ({device}) is slow: {duration(worker.shard_s)} a shard, "
        f"{worker.shard_s / worker.usual_s:.1f} times {usual}; in {worker.phase}: "
        f"{duration(worker.phase_s)} against {duration(worker.usual_phase_s)}"
    )
