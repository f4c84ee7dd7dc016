"""Pretending: how long shards take virtual workers.

Every worker draws from a stream of its own, so a run with one worker less, or another rule, draws
the same times for the others: what differs between two simulations is what was changed.
"""

from __future__ import annotations

from math import exp
from random import Random

from quorate.simulation.inputs import ShardTimes, Stragglers
from quorate.simulation.virtual_run import Work


class Pretending:
    """Draws shard times: call it.

    Args:
        times: how long shards take.
        stragglers: who is slow.
        workers: N.
        per_host: workers of a host, neighbours.
        seed: of all that is drawn.
    """

    def __init__(
        self, times: ShardTimes, stragglers: Stragglers, workers: int, per_host: int, seed: int
    ) -> None:
        self._times, self._stragglers, self._seed = times, stragglers, seed
        self._streams = [Random(f"{seed}/worker/{worker}") for worker in range(workers)]
        hosts = -(-workers // per_host)
        slow_hosts = _chosen(hosts, stragglers.slow_hosts, f"{seed}/hosts")
        slow_workers = _chosen(workers, stragglers.slow_workers, f"{seed}/workers")
        self._steady = [
            (stragglers.slow_factor if worker in slow_workers else 1.0)
            * (stragglers.slow_host_factor if worker // per_host in slow_hosts else 1.0)
            * (stragglers.steady[worker] if worker < len(stragglers.steady) else 1.0)
            for worker in range(workers)
        ]

    def __call__(self, worker: int, step: int, shard: int) -> Work:
        """Return how long worker w takes for shard s of step t.

        What a straggler takes longer than others it waits: it holds no core meanwhile.
        """
        times, stragglers, stream = self._times, self._stragglers, self._streams[worker]
        if times.measured_s:
            seconds = times.measured_s[int(stream.random() * len(times.measured_s))]
        else:
            seconds = times.mean_s * lognormal(stream, times.spread)
        if times.work_spread:
            of_shard = Random(f"{self._seed}/shard/{step}/{shard}")
            seconds *= lognormal(of_shard, times.work_spread)
        whole_s = seconds * self._steady[worker]
        if stragglers.probability and stream.random() < stragglers.probability:
            whole_s = whole_s * stragglers.factor + stragglers.extra_s
        computing_s = min(seconds, whole_s)
        return Work(computing_s, whole_s - computing_s)

    def leaves_off_s(self, worker: int) -> float:
        """Return how long worker w takes to leave off a shard, in seconds."""
        return self._times.leaves_off_s * self._steady[worker]

    @property
    def mean_s(self) -> float:
        """The mean of all workers' shards."""
        own, stragglers = self._times, self._stragglers
        mean_s = sum(own.measured_s) / len(own.measured_s) if own.measured_s else own.mean_s
        mean_s *= sum(self._steady) / len(self._steady)
        held_up_s = mean_s * stragglers.factor + stragglers.extra_s
        return mean_s + stragglers.probability * (held_up_s - mean_s)

    @property
    def undisturbed_s(self) -> float:
        """The mean of a shard that nothing holds up, on a worker that is not slow."""
        own = self._times
        return sum(own.measured_s) / len(own.measured_s) if own.measured_s else own.mean_s


def lognormal(stream: Random, spread: float) -> float:
    """Return a lognormal number of mean 1, the standard deviation of whose logarithm is given."""
    return exp(stream.gauss(0.0, 1.0) * spread - spread * spread / 2) if spread else 1.0


def _chosen(of: int, part: float, seed: str) -> set[int]:
    """Return so large a part of the numbers below ``of``, rounded, and at least one if it is one.

    Those of a smaller number are not those of a larger one.
    """
    count = max(1, round(of * part)) if part else 0
    return set(Random(seed).sample(range(of), count))
