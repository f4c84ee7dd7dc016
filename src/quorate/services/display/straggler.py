"""Stragglers: slow workers. The log names them at once, the display once per run.

A worker is called slow for either of two reasons. Its shards take much longer than the shards of
other workers: ``SlowWorkers`` compares the times. Or the coordinator had another worker compute a
shard too, because the first worker was late: ``CopiedShards`` counts these shards. Neither changes
a result, so the user reads one line about both at the end of a run; see ``Stragglers``.
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

FACTOR = 1.3  # times the shard time of other workers
# Over fewer shards a time may be off by a tenth and more, and a steady worker would look slow.
LEAST_SHARDS = 10
OVER_S = 60.0  # seconds at normal speed before a worker is said to be fast again
GROWS = 2.0  # growth of the slowness that is worth another message
# Any machine is busy with something else now and then. The log has these cases, but the line at the
# end does not: a worker slow in one measurement of several, and few shards computed twice.
LEAST_TIMES, LEAST_OFTEN = 3, 0.5  # number of measurements, or share of all measurements
LEAST_COPIED, LEAST_COPIED_S = 0.02, 1.0  # share of all shards, and their usual time in total
MOST_NAMED = 4  # workers in the line at the end: the rest are counted


class SlowWorker(NamedTuple):
    """A slow worker and the basis of the comparison; times in seconds per shard."""

    worker: int
    compared: tuple[int, ...]  # the workers whose median is the usual time
    shard_s: float
    usual_shard_s: float
    phase: str  # the phase with the greatest loss of time
    phase_s: float
    usual_phase_s: float

    @property
    def factor(self) -> float:
        """The worker's shard time over the usual shard time."""
        return self.shard_s / self.usual_shard_s


def slow(times: Mapping[int, ShardTime]) -> list[SlowWorker]:
    """List the workers that take ``FACTOR`` times the usual time or more, the slowest first.

    The usual time is the median of all workers or, with two workers, the time of the other worker.
    """
    known = {w: time.shard_s for w, time in times.items() if time.shard_s is not None}
    slow_workers = []
    for worker, shard_s in known.items():
        compared = tuple(w for w in known if len(known) > 2 or w != worker)
        usual_shard_s = median(known[w] for w in compared) if compared else inf
        if not 0 < FACTOR * usual_shard_s <= shard_s:
            continue
        own = times[worker].phases_s
        usual = {phase: median(times[w].phases_s[phase] for w in compared) for phase in WORK}
        phase = max(WORK, key=lambda name: own[name] - usual[name])
        slow_workers.append(
            SlowWorker(worker, compared, shard_s, usual_shard_s, phase, own[phase], usual[phase])
        )
    return sorted(slow_workers, key=lambda worker: -worker.shard_s)


@dataclass
class _Episode:
    """A period in which a worker is slow, with breaks shorter than ``OVER_S``."""

    said: float  # the slowness as last reported
    seen_at: float  # time of the last slow measurement
    is_said: bool


class _Episodes:
    """The slow workers, and the slowness last reported in the log for each."""

    def __init__(self) -> None:
        self._open: dict[int, _Episode] = {}
        self._quiet_until: dict[int, float] = {}
        self._pause_s: dict[int, float] = {}

    def tell(self, worker: int, how_slow: float, now: float) -> bool:
        """Note that a worker is slow; return whether to report the slowness."""
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
        """Note that a worker is not slow; return whether to report the end of its slowness."""
        episode = self._open.get(worker)
        if episode is None or now - episode.seen_at < OVER_S:
            return False
        del self._open[worker]
        # A worker that is slow every few minutes is reported less and less often.
        self._pause_s[worker] = pause_s = 2 * self._pause_s.get(worker, OVER_S / 2)
        self._quiet_until[worker] = now + pause_s
        return episode.is_said


class SlowWorkers:
    """A watch over the times of all workers, which names slow workers.

    A worker's time is taken over ``LEAST_SHARDS`` shards or more, without its first shard after a
    start. One thread.
    """

    def __init__(self) -> None:
        self._first: dict[int, int] = {}  # worker -> number of shards begun before its start
        self._since: dict[int, WorkerStatus] = {}  # worker -> status to measure from
        self._times: dict[int, ShardTime] = {}
        self._looks: Counter[int] = Counter()  # worker -> number of measurements
        self._episodes = _Episodes()
        self._counts: Counter[int] = Counter()  # worker -> number of slow measurements
        self._worst: dict[int, SlowWorker] = {}
        self.devices: dict[int, str] = {}  # worker -> its device

    def named(self, workers: Sequence[WorkerStatus], now: float) -> list[str]:
        """Return the lines for the log, if any: workers slow now, and workers no longer slow.

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
        """Return the greatest slowness of each slow worker: the factor, and a description."""
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
        """Note a status; return whether a new time of the worker is known."""
        number = status.number
        if status.is_gone or status.phase == "starting":
            self._first[number] = status.shards
            self._since.pop(number, None)
            self._times.pop(number, None)
            return False
        if status.shards <= self._first.get(number, 0) + 1:
            return False  # the first shard warms the worker up
        since = self._since.setdefault(number, status)
        if status.shards - since.shards < LEAST_SHARDS:
            return False
        self._times[number] = shard_time(since, status)
        self._since[number] = status
        return True


class CopiedShards:
    """A count of the shards of slow workers that more workers computed too. One thread."""

    def __init__(self) -> None:
        self._shards = 0  # assigned to workers, without copies
        self._copies: dict[int, Counter[str]] = {}  # worker -> job -> number of shards
        self._copies_s = 0.0  # the usual time of the copied shards, in seconds

    def count(self, task: Compute, usual_shard_s: float | None, job: str) -> None:
        """Note a task assigned to a worker.

        Args:
            usual_shard_s: for a copy, the usual shard time of the slow worker in seconds; None:
                the slow worker has not computed a shard yet, and is warming up.
            job: the purpose of the shard: "training", "validation".
        """
        if task.instead_of is None:
            self._shards += task.count
        elif usual_shard_s is not None:
            self._copies.setdefault(task.instead_of, Counter())[job] += task.count
            self._copies_s += usual_shard_s * task.count

    def found(self) -> dict[int, tuple[int, str]]:
        """Return the number of each worker's shards computed twice, and a description."""
        counts = {worker: copies.total() for worker, copies in self._copies.items()}
        if self._copies_s < LEAST_COPIED_S or sum(counts.values()) < LEAST_COPIED * self._shards:
            return {}
        return {worker: (counts[worker], _copied(self._copies[worker])) for worker in counts}


class Stragglers(NamedTuple):
    """The knowledge of a run about its slow workers."""

    slow_workers: SlowWorkers
    copied_shards: CopiedShards

    @classmethod
    def none(cls) -> Stragglers:
        """Return the empty state for a new run."""
        return cls(SlowWorkers(), CopiedShards())

    def summary(self) -> str | None:
        """Return the line about the whole run; None if no worker was slow enough to be named."""
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
    """Return ``had 37 shards of training and 2 of validation computed by another worker too``."""
    parts = [f"{count:,}" for count in copies.values()]
    parts[0] += f" shard{'' if parts[0] == '1' else 's'}"
    listed = [f"{part} of {job}" for part, job in zip(parts, copies, strict=True)]
    return f"had {' and '.join(listed)} computed by another worker too"


def described(worker: SlowWorker, device: str) -> str:
    """Return "worker 1 (cpu) is slow: 31 ms a shard, 2.0 times worker 0's; in forward: ..."."""
    usual = f"the median of {duration(worker.usual_shard_s)}"
    if len(worker.compared) == 1:
        usual = f"worker {worker.compared[0]}'s {duration(worker.usual_shard_s)}"
    return (
        f"worker {worker.worker} ({device}) is slow: {duration(worker.shard_s)} a shard, "
        f"{worker.factor:.1f} times {usual}; in {worker.phase}: "
        f"{duration(worker.phase_s)} against {duration(worker.usual_phase_s)}"
    )
