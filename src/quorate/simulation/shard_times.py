"""Shard times: how long shards take virtual workers, and what links to servers add.

Every worker draws from a stream of its own, so a run with one worker less, or another rule, draws
the same times for the others: what differs between two simulations is what was changed.

Servers have a slice each, on hosts of workers, the coordinator's last. Ray brings a host the slices
of others once per update, and each shard's gradient goes out in slices. A worker beside the only
server waits for neither: under ``sync`` it takes over shards of those that do. All hosts are taken
to send at once, so a link that is short is shared by all who use it.

Legend: H hosts, P workers of a host, N workers, S servers, G bytes of a gradient and of the
parameters, h host, w worker, t step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import exp
from random import Random
from statistics import median

from quorate.simulation.inputs import Network, ShardTimes, Stragglers
from quorate.simulation.virtual_run import ShardWork


class ShardTimeModel:
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

    def __call__(self, worker: int, step: int, shard: int) -> ShardWork:
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
        return ShardWork(computing_s, whole_s - computing_s)

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


class ServerTraffic:
    """What links add to shards where there are servers; nothing where there are none.

    Args:
        network: what is sent, and how fast.
        hosts: of each worker, from 0, the coordinator's.
    """

    def __init__(self, network: Network, hosts: Sequence[int]) -> None:
        self._hosts, self._servers = hosts, network.servers
        count = max(hosts) + 1
        self.pulls_s = [0.0] * count  # by host: of an update
        self.pushes_s = [0.0] * count  # of a shard
        if not self._servers:
            return
        owns = Counter((1 + number) % count for number in range(self._servers))
        own = [owns[host] / self._servers for host in range(count)]  # part of all
        workers = Counter(hosts)
        link_s, ray_s = network.link_s, network.ray_s  # Ray's is the same within a host
        middle_s = network.gradient_bytes / network.bisection_bytes_per_s * (count > 1)
        for host in range(count):
            self.pulls_s[host] = self.pushes_s[host] = ray_s
            if own[host] == 1.0:  # all that its workers need is there
                continue
            # In over its own link; out of each other that has a slice, to all hosts but that.
            others = [other for other in range(count) if other != host and own[other]]
            sent = max((count - 1) * own[other] for other in others)
            in_s = max(1.0 - own[host], sent) * link_s
            self.pulls_s[host] += max(in_s, count / 2 * middle_s)
            # Out of its own link; into each other that has one, from all workers elsewhere.
            taken = max((len(hosts) - workers[other]) * own[other] for other in others)
            out_s = max(workers[host] * (1.0 - own[host]), taken) * link_s
            self.pushes_s[host] += max(out_s, len(hosts) / 2 * middle_s)

    @property
    def median_s(self) -> float:
        """What a shard of its own takes the worker of a host in links, seconds."""
        return median(pull + push for pull, push in zip(self.pulls_s, self.pushes_s, strict=True))

    def around(
        self, shard_s: Callable[[int, int, int], ShardWork]
    ) -> Callable[[int, int, int], ShardWork]:
        """Return what shards take with links, for one run, from what they take without.

        The first shard of a step waits for parameters. The next ones of a worker are begun while
        the gradient of the one before is on its way.
        """
        if not self._servers:
            return shard_s
        steps: dict[int, int] = {}  # by worker: of its newest shard

        def linked(worker: int, step: int, shard: int) -> ShardWork:
            work, host = shard_s(worker, step, shard), self._hosts[worker]
            push_s = self.pushes_s[host]
            if steps.get(worker) == step:
                computing_s = max(0.0, work.computing_s - push_s)
                return work._replace(computing_s=computing_s, pushing_s=push_s)
            steps[worker] = step
            return work._replace(pulling_s=self.pulls_s[host], pushing_s=push_s)

        return linked


def lognormal(stream: Random, spread: float) -> float:
    """Return a lognormal number of mean 1, the standard deviation of whose logarithm is given."""
    return exp(stream.gauss(0.0, 1.0) * spread - spread * spread / 2) if spread else 1.0


def _chosen(of: int, part: float, seed: str) -> set[int]:
    """Return so large a part of the numbers below ``of``, rounded, and at least one if it is one.

    Those of a smaller number are not those of a larger one.
    """
    count = max(1, round(of * part)) if part else 0
    return set(Random(seed).sample(range(of), count))
