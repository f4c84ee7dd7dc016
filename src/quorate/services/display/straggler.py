"""Stragglers: workers whose shards take much longer than others', and the phase that is slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from statistics import median
from typing import NamedTuple

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
    """Who takes ``FACTOR`` times as long as usual, the slowest first.

    Usual is the median of all workers, or with two of them the time of the other one.
    """
    known = {w: p.shard_s for w, p in times.items() if p.shard_s is not None}
    found = []
    for worker, shard_s in known.items():
        compared = tuple(w for w in known if len(known) > 2 or w != worker)
        usual_s = median(known[w] for w in compared) if compared else inf
        if not 0 < FACTOR * usual_s <= shard_s:
            continue
        own = times[worker].phases_s
        usual = {phase: median(times[w].phases_s[phase] for w in compared) for phase in WORK}
        phase = max(WORK, key=lambda name: own[name] - usual[name])
        found.append(Slow(worker, compared, shard_s, usual_s, phase, own[phase], usual[phase]))
    return sorted(found, key=lambda each: -each.shard_s)


class SlowWorkers:
    """Watches all workers, and names those that are slow: each at most once a minute.

    A worker's time is taken over ``LEAST_SHARDS`` shards or more, and not over its first one after
    a start. One thread.
    """

    def __init__(self) -> None:
        self._first: dict[int, int] = {}  # worker -> how many shards it had begun at its start
        self._since: dict[int, WorkerStatus] = {}  # worker -> what its next time is taken from
        self._times: dict[int, ShardTime] = {}
        self._named_at: dict[int, float] = {}

    def named(self, workers: Sequence[WorkerStatus], now: float) -> list[str]:
        """The lines to show, if any.

        Args:
            now: seconds on any clock.
        """
        devices = {status.number: status.device for status in workers}
        news = {status.number for status in workers if self._learns(status)}
        lines = []
        for found in slow(self._times):
            number = found.worker
            if number in news and now - self._named_at.get(number, -inf) >= EVERY_S:
                self._named_at[number] = now
                lines.append(described(found, devices[number]))
        return lines

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


def described(found: Slow, device: str) -> str:
    """``worker 1 (cpu) is slow: 31 ms a shard, 2.0 times worker 0's 15 ms; in forward: ...``."""
    usual = f"the median of {duration(found.usual_s)}"
    if len(found.compared) == 1:
        usual = f"worker {found.compared[0]}'s {duration(found.usual_s)}"
    return (
        f"worker {found.worker} ({device}) is slow: {duration(found.shard_s)} a shard, "
        f"{found.shard_s / found.usual_s:.1f} times {usual}; in {found.phase}: "
        f"{duration(found.phase_s)} against {duration(found.usual_phase_s)}"
    )
