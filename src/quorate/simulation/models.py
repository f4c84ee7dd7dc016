"""Models of a simulation: times of shards, what links to servers add, and shared cores.

Every worker draws from a random stream of the worker's own. So in a run with a worker less, or with
another rule, the workers draw the same times: two simulations differ by their inputs alone.

Each server has a slice of the parameters. Servers are on the hosts of workers, the coordinator's
host last. Ray sends a host the slices of other hosts once per update, and each shard's gradient in
slices. A worker on the host of the only server waits for neither; under ``sync`` the worker takes
over shards of waiting workers. The model assumes that all hosts send at once, over shared links.

The workers of a host compute on the same cores (processor sharing). A job needs a number of seconds
on a core of its own. With more threads than cores every job gets an equal share of the cores, as
from a fair scheduler. Where all cores compute, each core is slower than a core alone, because the
cores share memory, caches and clock; see ``inputs.Cores``.

A host records how many seconds of work every job of the host has received since the beginning, a
number common to all jobs. A job ends when the number has grown by the seconds of the job. So the
number is the clock of an event queue, and the begin and the end of a job cost O(log N).

Legend: N workers, w worker, t step, s shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, inf
from random import Random
from statistics import median
from typing import NamedTuple

from quorate.simulation.event_queue import EventQueue
from quorate.simulation.inputs import Cores, Network, ShardTimes, Stragglers


class ShardWork(NamedTuple):
    """Seconds of a worker for a shard: on a core of the worker's own, and without a core.

    A worker abandons a canceled shard between pulling the parameters and pushing the gradient. A
    cancellation during the push comes too late.
    """

    computing_s: float
    waiting_s: float = 0.0
    pulling_s: float = 0.0
    pushing_s: float = 0.0


class ShardTimeModel:
    """A function that draws shard times.

    Args:
        times: how long shards take.
        stragglers: slow workers and hosts.
        workers: N.
        per_host: number of workers of a host; they have consecutive numbers.
        seed: seed of all random numbers.
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

        A straggler waits for the additional time, without a core.
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
        """Return how long worker w takes to abandon a canceled shard, in seconds."""
        return self._times.leaves_off_s * self._steady[worker]

    @property
    def mean_s(self) -> float:
        """The mean time of a shard over all workers, in seconds."""
        mean_s = self._times.undisturbed_s * (sum(self._steady) / len(self._steady))
        delayed_s = mean_s * self._stragglers.factor + self._stragglers.extra_s
        return mean_s + self._stragglers.probability * (delayed_s - mean_s)


class ServerTraffic:
    """The time that links to servers add to shards; 0 without servers.

    Args:
        network: the amount of data, and the speed of links.
        hosts: the number of each worker's host, from 0, the coordinator's, on.
    """

    def __init__(self, network: Network, hosts: Sequence[int]) -> None:
        self._hosts, self._servers = hosts, network.servers
        count = max(hosts) + 1
        self.pulls_s = [0.0] * count  # by host: to receive the parameters of an update
        self.pushes_s = [0.0] * count  # by host: to send the gradient of a shard
        if not self._servers:
            return
        owns = Counter((1 + number) % count for number in range(self._servers))
        own = [owns[host] / self._servers for host in range(count)]  # a share of all
        workers = Counter(hosts)
        link_s, ray_s = network.link_s, network.ray_s  # Ray's is the same within a host
        middle_s = network.gradient_bytes / network.bisection_bytes_per_s * (count > 1)
        for host in range(count):
            self.pulls_s[host] = self.pushes_s[host] = ray_s
            if own[host] == 1.0:  # nothing crosses the link
                continue
            # In over the host's own link; out of each other host with a slice, to all hosts.
            others = [other for other in range(count) if other != host and own[other]]
            sent = max((count - 1) * own[other] for other in others)
            in_s = max(1.0 - own[host], sent) * link_s
            self.pulls_s[host] += max(in_s, count / 2 * middle_s)
            # Out of the host's own link; into each other host with a slice, from all workers.
            taken = max((len(hosts) - workers[other]) * own[other] for other in others)
            out_s = max(workers[host] * (1.0 - own[host]), taken) * link_s
            self.pushes_s[host] += max(out_s, len(hosts) / 2 * middle_s)

    @property
    def median_s(self) -> float:
        """The time of links for a worker's home shard, in seconds; the median over hosts."""
        return median(pull + push for pull, push in zip(self.pulls_s, self.pushes_s, strict=True))

    def around(
        self, shard_s: Callable[[int, int, int], ShardWork]
    ) -> Callable[[int, int, int], ShardWork]:
        """Return a function with the work of shards, links included, for one run.

        A worker's first shard of a step waits for parameters. The worker begins each further shard
        while the gradient of the previous shard travels.

        Args:
            shard_s: the work of shards without links.
        """
        if not self._servers:
            return shard_s
        steps: dict[int, int] = {}  # by worker: step of the newest shard

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
    """Return a log-normal number of mean 1.

    Args:
        spread: standard deviation of the logarithm.
    """
    return exp(stream.gauss(0.0, 1.0) * spread - spread * spread / 2) if spread else 1.0


def _chosen(of: int, part: float, seed: str) -> set[int]:
    """Return random numbers below ``of``: a share ``part`` of them, rounded, at least one if any.

    The choice from few numbers is not a part of the choice from more numbers.
    """
    count = max(1, round(of * part)) if part else 0
    return set(Random(seed).sample(range(of), count))


COORDINATOR = -1  # number of the coordinator's job; workers have the numbers from 0 on


class SharedCores:
    """Jobs on the cores of hosts. Times are virtual seconds, and never go back.

    Args:
        hosts: the number of each worker's host; the coordinator is on host 0.
        cores: the cores of each host, and the threads of each job.
        beside: number of permanent jobs of one thread on each host.
    """

    def __init__(self, hosts: Sequence[int], cores: Cores, beside: int = 0) -> None:
        self._host_of = hosts
        self._cores, self._beside = cores, beside
        self._hosts = [_SimulatedHost() for _ in range(max(hosts, default=0) + 1)]
        # The end of the first job of each host, void once a job of the host begins or ends.
        self._ends: EventQueue[_SimulatedHost] = EventQueue()

    def begin(self, now: float, job: int, seconds: float) -> None:
        """Begin a job: a worker's number, or ``COORDINATOR``."""
        host = self._of(job)
        self._settle(host, now)
        host.jobs[job] = tag = host.ends.now + seconds
        is_first = job == COORDINATOR
        host.ends.post(tag, job, lambda: host.jobs.get(job) == tag, is_first=is_first)
        self._look_ahead(host)

    def leave_off(self, now: float, job: int) -> None:
        """End a job early, if the job is under way."""
        host = self._of(job)
        if job in host.jobs:
            self._settle(host, now)
            del host.jobs[job]
            self._look_ahead(host)

    @property
    def next_at(self) -> float:
        """The time at which the next job ends; infinite if there is none."""
        return self._ends.next_at

    def end(self) -> tuple[float, int]:
        """End the next job, and return its time and its number."""
        at, host = self._ends.next_at, self._ends.next()
        assert host is not None
        self._settle(host, at)
        job = host.ends.next()
        assert job is not None
        del host.jobs[job]
        self._look_ahead(host)
        return at, job

    def _of(self, job: int) -> _SimulatedHost:
        return self._hosts[0 if job == COORDINATOR else self._host_of[job]]

    def _settle(self, host: _SimulatedHost, now: float) -> None:
        """Record the work up to ``now``."""
        if host.jobs:
            host.ends.now += max(0.0, now - host.at) / self._slowdown(host)
        host.at = max(host.at, now)

    def _slowdown(self, host: _SimulatedHost) -> float:
        return self._cores.slowdown(len(host.jobs) * self._cores.threads + self._beside)

    def _look_ahead(self, host: _SimulatedHost) -> None:
        """Find the next end on a host whose jobs have changed."""
        host.version = version = host.version + 1
        if (tag := host.ends.next_at) < inf:
            at = host.at + max(0.0, tag - host.ends.now) * self._slowdown(host)
            self._ends.post(at, host, lambda: host.version == version)


@dataclass(eq=False, slots=True)
class _SimulatedHost:
    """The jobs of a host."""

    at: float = 0.0  # ``ends.now`` is as of this time
    # Jobs by number, in seconds of work that a job from the beginning would have received.
    ends: EventQueue[int] = field(default_factory=EventQueue)
    jobs: dict[int, float] = field(default_factory=dict)  # by number: ``ends.now`` at the end
    version: int = 0  # number of changes of ``jobs``
