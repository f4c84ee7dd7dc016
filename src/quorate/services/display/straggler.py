"""Stragglers: the one voice that calls a worker slow, once for each reason.

There are two reasons. A worker's shards take it much longer than others need for theirs, which the
display sees in the times of workers; and another worker computes a shard too that it has had for
long, which the coordinator decides. It is said again when a worker is twice as slow as was said,
and when it is slow no longer; how often it was is summed up at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import NamedTuple

from quorate.coordination.protocol import Compute
from quorate.coordination.run_event import SLOW, TAKEOVER, RunEvent
from quorate.services.display.shard_time import WORK, ShardTime, duration, shard_time
from quorate.transports.worker_status import WorkerStatus

FACTOR = 1.3  # times the others' shard time
# Over fewer shards a time may be off by a tenth and more, and a steady worker look slow.
LEAST_SHARDS = 10
OVER_S = 60.0  # that a worker has to be as fast as others, for that to be said
GROWS = 2.0  # times as slow as was said
# Of shorter shards one is late whenever the system has anything else to do: copies of them are
# counted, and no line each says so. A worker that is slow for long is named by its times.
LEAST_NAMED_S = 0.05


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


@dataclass
class _Episode:
    """A time in which a worker is slow, with breaks shorter than ``OVER_S``."""

    said: float  # how slow, as it was said
    seen_at: float  # last
    is_said: bool


class _Episodes:
    """Which workers are slow, how slow that was said to be, and how often they were."""

    def __init__(self) -> None:
        self._open: dict[int, _Episode] = {}
        self._quiet_until: dict[int, float] = {}
        self._pause_s: dict[int, float] = {}
        self._lines = 0
        self.counts: Counter[int] = Counter()  # how often each was slow
        self.most: dict[int, float] = {}  # how slow each was

    def tell(self, worker: int, how_slow: float, now: float) -> bool:
        """Take note that a worker is slow; whether that is to be said."""
        self.count(worker, how_slow)
        episode = self._open.get(worker)
        if episode is None:
            is_said = now >= self._quiet_until.get(worker, -inf)
            self._open[worker] = _Episode(how_slow, now, is_said)
            self._lines += is_said
            return is_said
        episode.seen_at = now
        if how_slow < GROWS * episode.said:
            return False
        episode.said, episode.is_said = how_slow, True
        self._lines += 1
        return True

    def count(self, worker: int, how_slow: float) -> None:
        """Take note that a worker is slow, which is not to be said before the end."""
        self.counts[worker] += 1
        self.most[worker] = max(how_slow, self.most.get(worker, 0.0))

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

    @property
    def has_more(self) -> bool:
        """Whether workers were slow more often than was said."""
        return self.counts.total() > self._lines


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

    def named(self, workers: Sequence[WorkerStatus], now: float) -> list[str]:
        """Return the lines to show, if any.

        Args:
            now: seconds on any clock.
        """
        devices = {status.number: status.where for status in workers}
        news = {status.number for status in workers if self._learns(status)}
        self._looks.update(news)
        slow_ones = [worker for worker in slow(self._times) if worker.worker in news]
        lines = [
            described(worker, devices[worker.worker])
            for worker in slow_ones
            if self._episodes.tell(worker.worker, worker.shard_s / worker.usual_s, now)
        ]
        fast = sorted(news - {worker.worker for worker in slow_ones})
        over = [number for number in fast if self._episodes.is_over(number, now)]
        return lines + [f"worker {number} ({devices[number]}) is no longer slow" for number in over]

    def summary(self) -> str | None:
        """Return a line about all of the run, if there was more than was said."""
        if not self._episodes.has_more:
            return None
        most = self._episodes.most
        said = [
            f"worker {worker} {count} of {self._looks[worker]} times, up to {most[worker]:.1f} "
            "times as long as usual"
            for worker, count in sorted(self._episodes.counts.items())
        ]
        return f"slow workers in all: {'; '.join(said)}"

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
        job: whose steps are meant, "the evaluation" for one; "": those of training.
    """

    def __init__(self, usual_s: Callable[[int], float | None], job: str = "") -> None:
        self._usual_s = usual_s
        self._of_job = f" of {job}" if job else ""
        self._episodes = _Episodes()

    def named(self, task: Compute, now: float) -> str | None:
        """Return the line to show about a task that a worker is given, if any.

        Args:
            now: seconds on any clock.
        """
        if task.instead_of is None:
            if not self._episodes.is_over(task.worker, now):
                return None
            line = f"worker {task.worker} is no longer slow: it computes its shards alone again"
            return RunEvent(line, SLOW, task.worker)
        shard_s = self._usual_s(task.instead_of)
        if shard_s is None:  # its first shard: it is warming up
            return None
        usual_s = self._usual_s(task.worker)
        how_slow = shard_s / (usual_s or shard_s or 1.0)
        if shard_s < LEAST_NAMED_S:
            self._episodes.count(task.instead_of, how_slow)
            return None
        if not self._episodes.tell(task.instead_of, how_slow, now):
            return None
        times = f"worker {task.instead_of} {duration(shard_s)}"
        if usual_s is not None:
            times += f", worker {task.worker} {duration(usual_s)}"
        return RunEvent(
            f"{task.reason}; worker {task.worker} computes shard {task.shard} of step {task.step}"
            f"{self._of_job} too (a shard usually takes {times})",
            TAKEOVER,
            task.worker,
        )

    def summary(self) -> str | None:
        """Return a line about all of the run, if there was more than was said."""
        if not self._episodes.has_more:
            return None
        counts = sorted(self._episodes.counts.items())
        said = ", ".join(f"{count:,} of worker {worker}'s" for worker, count in counts)
        what = f"shards{self._of_job}"
        line = f"{what} that another worker computed too, as theirs was slow: {said}"
        return RunEvent(line, SLOW)


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
