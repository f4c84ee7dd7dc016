"""Stragglers: workers that are slow. The log names them at once, the display once per run.

Two observations call a worker slow. Its shards take much longer than the shards of other workers:
``SlowWorkers`` compares the times of workers. Or the coordinator had another worker compute a shard
too, because the first one was late: ``CopiedShards`` counts those. Neither changes a result, so the
user reads one line about both at the end of a run; see ``Stragglers``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import NamedTuple

from quorate.coordination.protocol import Compute
from quorate.engines.worker_status import WorkerStatus
from quorate.services.display.shard_time import WORK, ShardTime, duration, shard_time

FACTOR = 1.3  # times the others' shard time
# Over fewer shards a time may be off by a tenth and more, and a steady worker look slow.
LEAST_SHARDS = 10
OVER_S = 60.0  # that a worker has to be as fast as others, for that to be said
GROWS = 2.0  # times as slow as was said
# Any machine has something else to do now and then. What follows from that is in the log, and not
# in the line at the end: a worker that was slow in one measurement of several, and few shards that
# were computed twice.
LEAST_TIMES, LEAST_OFTEN = 3, 0.5  # measurements, or this share of them
LEAST_COPIED, LEAST_COPIED_S = 0.02, 1.0  # share of all shards, and what they usually take in all
MOST_NAMED = 4  # workers in the line at the end: the rest is counted


class Slow(NamedTuple):
    """A worker that is slow, and what it was compared with; times per shard."""

    worker: int
    compared: tuple[int, ...]  # with the median of these
    shard_s: float
    usual_s: float
    phase: str  # in which it loses most
    phase_s: float
    usual_phase_s: float

    @property
    def factor(self) -> float:
        """How many times as long as usual its shards take."""
        return self.shard_s / self.usual_s


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


@dataclass
class _Episode:
    """A time in which a worker is slow, with breaks shorter than ``OVER_S``."""

    said: float  # how slow, as it was said
    seen_at: float  # last
    is_said: bool


class _Episodes:
    """Which workers are slow, and how slow the log says that they are."""

    def __init__(self) -> None:
        self._open: dict[int, _Episode] = {}
        self._quiet_until: dict[int, float] = {}
        self._pause_s: dict[int, float] = {}

    def tell(self, worker: int, how_slow: float, now: float) -> bool:
        """Take note that a worker is slow; whether that is to be said."""
        episode = self._open.get(worker)
        if episode is None:
            is_said = now >= self._quiet_until.get(worker, -inf)
            self._open[worker] = _Episode(how_slow, now, is_said)
            return is_said
        episode.seen_at = now
        if how_slow < GROWS * episode.said:
            return False
        episode.said, episode.is_said = how_slow, True
        return True

    def is_over(self, worker: int, now: float) -> bool:
        """Take note that a worker is not slow; whether it is to be said that it no longer is."""
        episode = self._open.get(worker)
        if episode is None or now - episode.seen_at < OVER_S:
            return False
        del self._open[worker]
        # Of one that is slow every few minutes the log says so ever less often.
        self._pause_s[worker] = pause_s = 2 * self._pause_s.get(worker, OVER_S / 2)
        self._quiet_until[worker] = now + pause_s
        return episode.is_said


class SlowWorkers:
    """Watches the times of all workers, and names those that are slow.

    A worker's time is taken over ``LEAST_SHARDS`` shards or more, and not over its first one after
    a start. One thread.
    """

    def __init__(self) -> None:
        self._first: dict[int, int] = {}  # worker -> how many shards it had begun at its start
        self._since: dict[int, WorkerStatus] = {}  # worker -> what its next time is taken from
        self._times: dict[int, ShardTime] = {}
        self._looks: Counter[int] = Counter()  # worker -> times that were compared
        self._episodes = _Episodes()
        self._counts: Counter[int] = Counter()  # worker -> times that were slow
        self._worst: dict[int, Slow] = {}
        self.devices: dict[int, str] = {}  # worker -> where it is

    def named(self, workers: Sequence[WorkerStatus], now: float) -> list[str]:
        """Return the lines for the log, if any: who is slow now, and who no longer is.

        Args:
            now: seconds on any clock.
        """
        self.devices = devices = {status.number: status.where for status in workers}
        news = {status.number for status in workers if self._learns(status)}
        self._looks.update(news)
        slow_ones = [worker for worker in slow(self._times) if worker.worker in news]
        for worker in slow_ones:
            self._counts[worker.worker] += 1
            before = self._worst.get(worker.worker, worker)
            self._worst[worker.worker] = max(before, worker, key=lambda each: each.factor)
        lines = [
            described(worker, devices[worker.worker])
            for worker in slow_ones
            if self._episodes.tell(worker.worker, worker.factor, now)
        ]
        fast = sorted(news - {worker.worker for worker in slow_ones})
        over = [number for number in fast if self._episodes.is_over(number, now)]
        return lines + [f"worker {number} ({devices[number]}) is no longer slow" for number in over]

    def found(self) -> dict[int, tuple[float, str]]:
        """Return how slow each slow worker was at most, as a factor, and that in words."""
        return {
            number: (
                worst.factor,
                f"needed up to {duration(worst.shard_s)} for a shard, {worst.factor:.1f} times the "
                f"usual time, mostly in {worst.phase} (in {self._counts[number]:,} of "
                f"{self._looks[number]:,} measurements)",
            )
            for number, worst in self._worst.items()
            if (times := self._counts[number]) >= LEAST_TIMES
            or times >= max(2, LEAST_OFTEN * self._looks[number])
        }

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
    """Counts the shards of slow workers that other workers computed too. One thread."""

    def __init__(self) -> None:
        self._shards = 0  # that were given to a worker, copies left out
        self._copies: dict[int, Counter[str]] = {}  # worker -> what for -> shards
        self._copies_s = 0.0  # that those usually take

    def count(self, task: Compute, usual_s: float | None, job: str) -> None:
        """Take note of a task that a worker is given.

        Args:
            usual_s: that the slow worker, if it is a copy, usually has for a shard; None: it has
                computed none yet, and is warming up.
            job: what the shard is for: "training", "validation".
        """
        if task.instead_of is None:
            self._shards += task.count
        elif usual_s is not None:
            self._copies.setdefault(task.instead_of, Counter())[job] += task.count
            self._copies_s += usual_s * task.count

    def found(self) -> dict[int, tuple[int, str]]:
        """Return how many shards of each worker were computed twice, and that in words."""
        counts = {worker: copies.total() for worker, copies in self._copies.items()}
        if self._copies_s < LEAST_COPIED_S or sum(counts.values()) < LEAST_COPIED * self._shards:
            return {}
        return {worker: (counts[worker], _copied(self._copies[worker])) for worker in counts}


class Stragglers(NamedTuple):
    """All that a run knows of its slow workers."""

    slow_workers: SlowWorkers
    copied_shards: CopiedShards

    @classmethod
    def none(cls) -> Stragglers:
        """Return those of a run that begins."""
        return cls(SlowWorkers(), CopiedShards())

    def summary(self) -> str | None:
        """Return the line about all of a run; None if no worker was slow enough to be named."""
        return _summary(self.slow_workers, self.copied_shards)


def _summary(slow_workers: SlowWorkers, copied_shards: CopiedShards) -> str | None:
    late, copied = slow_workers.found(), copied_shards.found()
    nothing = (0, "")

    def cost(worker: int) -> tuple[float, int]:
        return late.get(worker, nothing)[0], copied.get(worker, nothing)[0]

    said = []
    workers = sorted(late.keys() | copied.keys(), key=cost, reverse=True)
    for worker in workers[:MOST_NAMED]:
        device = slow_workers.devices.get(worker)
        name = f"worker {worker}" if device is None else f"worker {worker} ({device})"
        words = [found[worker][1] for found in (late, copied) if worker in found]
        said.append(f"{name} {', and '.join(words)}")
    if more := len(workers) - len(said):
        said.append(f"and {more} more")
    return f"slow workers: {'; '.join(said)}" if said else None


def _copied(copies: Counter[str]) -> str:
    """``had 37 shards of training and 2 of validation computed by another worker too``."""
    parts = [f"{count:,}" for count in copies.values()]
    parts[0] += f" shard{'' if parts[0] == '1' else 's'}"
    listed = [f"{part} of {job}" for part, job in zip(parts, copies, strict=True)]
    return f"had {' and '.join(listed)} computed by another worker too"


def described(worker: Slow, device: str) -> str:
    """``worker 1 (cpu) is slow: 31 ms a shard, 2.0 times worker 0's 15 ms; in forward: ...``."""
    usual = f"the median of {duration(worker.usual_s)}"
    if len(worker.compared) == 1:
        usual = f"worker {worker.compared[0]}'s {duration(worker.usual_s)}"
    return (
        f"worker {worker.worker} ({device}) is slow: {duration(worker.shard_s)} a shard, "
        f"{worker.factor:.1f} times {usual}; in {worker.phase}: "
        f"{duration(worker.phase_s)} against {duration(worker.usual_phase_s)}"
    )
