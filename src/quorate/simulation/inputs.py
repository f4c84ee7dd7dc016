"""The inputs of a simulation: shard times, stragglers, failures, network, checkpoints, cores.

Units are in the names: ``_s`` seconds, ``_h`` hours, ``_bytes``. Each group checks its values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from quorate.coordination import ownership
from quorate.coordination.rules import Rule
from quorate.errors import SettingError
from quorate.settings import Settings, at_least, declare, one_of

ENGINES = ("processes", "ray", "collective")
MOST = 1e12  # of a finite number: a terabyte, or 30,000 years in seconds
WIDEST = 3.0  # of a spread: the mean of a wider spread lies in times too rare to be drawn


def number(
    least: float = 0.0, most: float = MOST, *, is_above: bool = False
) -> Callable[[str, Any], float]:
    """Return the check of a number from ``least`` to ``most``.

    Args:
        least: the smallest number.
        most: the largest number; may be infinite.
        is_above: whether ``least`` itself is refused.
    """

    def check(name: str, value: Any) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not (value > least if is_above else value >= least):
            expected = f"a number {'>' if is_above else '>='} {least:g}"
            raise SettingError(name, value, expected, "choose a larger one")
        if value > most:
            raise SettingError(name, value, f"a number <= {most:g}", "choose a smaller one")
        return float(value)

    return check


not_negative = number()
positive = number(is_above=True)
unbounded = number(most=inf, is_above=True)
deviation = number(most=WIDEST)  # standard deviation of a logarithm
share = number(most=1.0)  # a probability, or a part of a whole
slowdown = number(least=1.0)  # a factor


def _times(name: str, value: Sequence[Any]) -> tuple[float, ...]:
    return tuple(positive(name, second) for second in value)


@dataclass(frozen=True, kw_only=True)
class ShardTimes(Settings):
    """Time of a worker for a whole shard: loading, forward, backward, and sending the result.

    Args:
        mean_s: mean time in seconds. Default: 1.
        spread: standard deviation of the logarithm of the time (log-normal), drawn anew for each
            shard that a worker computes. 0: all shards take the mean. Default: 0.
        work_spread: standard deviation of the logarithm of the work in a shard. Long rows take
            longer on any worker, so a copy on another worker does not help. Default: 0.
        measured_s: measured times in seconds; each shard draws one of them at random. Replaces
            ``mean_s`` and ``spread``.
        leaves_off_s: seconds until a worker abandons a canceled shard; workers check between two
            phases. A slow worker takes proportionally longer. Default: 0.01.
    """

    mean_s: float = declare(1.0, "mean time of a shard", check=positive)
    spread: float = declare(0.0, "log-normal spread of shard times", check=deviation)
    work_spread: float = declare(0.0, "log-normal spread of the work in a shard", check=deviation)
    measured_s: Sequence[float] = declare((), "measured times to draw from", check=_times)
    leaves_off_s: float = declare(
        0.01, "seconds until a canceled shard is abandoned", check=not_negative
    )

    @property
    def undisturbed_s(self) -> float:
        """The mean time of a shard without delays, on a worker of usual speed, in seconds."""
        return sum(self.measured_s) / len(self.measured_s) if self.measured_s else self.mean_s


@dataclass(frozen=True, kw_only=True)
class Stragglers(Settings):
    """Slow workers and hosts, in addition to the spread of shard times.

    Args:
        probability: probability that a shard is delayed, drawn anew for each shard.
        factor: slowdown factor of a delayed shard.
        extra_s: additional delay of a delayed shard, in seconds.
        slow_workers: share of the workers that are always slow.
        slow_factor: slowdown factor of a slow worker.
        slow_hosts: share of the hosts that are always slow, with all workers of the host.
        slow_host_factor: slowdown factor of the workers of a slow host.
        steady: slowdown factor of each worker, by number; further workers have factor 1.
    """

    probability: float = declare(0.0, "probability of a delayed shard", check=share)
    factor: float = declare(1.0, "slowdown of a delayed shard", check=slowdown)
    extra_s: float = declare(0.0, "additional delay", check=not_negative)
    slow_workers: float = declare(0.0, "share of slow workers", check=share)
    slow_factor: float = declare(1.0, "slowdown of a slow worker", check=slowdown)
    slow_hosts: float = declare(0.0, "share of slow hosts", check=share)
    slow_host_factor: float = declare(1.0, "slowdown of a slow host", check=slowdown)
    steady: Sequence[float] = declare((), "slowdown by worker", check=_times)


@dataclass(frozen=True, kw_only=True)
class Cores(Settings):
    """CPU cores of a host, shared by its workers, and by the coordinator during an update.

    Args:
        per_host: number of cores per host. None: a core for each thread. Default: None.
        threads: threads of each worker. Default: 1.
        crowding: slowdown factor of a shard when all cores of the host are busy, because the cores
            share memory, caches and clock. Default: 1.
    """

    per_host: int | None = declare(None, "cores of a host", check=at_least(1))
    threads: int = declare(1, "threads of a worker", check=at_least(1))
    crowding: float = declare(1.0, "slowdown when all cores are busy", check=slowdown)

    def slowdown(self, threads: int) -> float:
        """Return the slowdown factor of a job while a number of threads of the host compute."""
        if self.per_host is None:
            return 1.0
        others = min(1.0, (threads - 1) / (self.per_host - 1)) if self.per_host > 1 else 0.0
        return max(1.0, threads / self.per_host) * (1.0 + (self.crowding - 1.0) * others)

    def start_slowdown(self, workers: int) -> float:
        """Return the slowdown factor of the start of a worker while the other workers compute."""
        if self.per_host is None:
            return 1.0
        return max(1.0, ((workers - 1) * self.threads + 1) / self.per_host)


@dataclass(frozen=True, kw_only=True)
class Failures(Settings):
    """Independent failures with exponentially distributed times between failures.

    Args:
        worker_mtbf_h: mean time between failures of a worker, in hours. Default: no failures.
        host_mtbf_h: mean time between failures of a host, which takes down all its workers, in
            hours. Default: no failures.
        coordinator_mtbf_h: mean time between failures of the coordinator's process, in hours. None:
            as for a worker.
        detection_s: seconds until a failure is detected. Default: 1.
        restart_s: seconds from the detection until the worker or host is back. Default: 30.
        run_restart_s: seconds until the whole run continues after a restart from a checkpoint.
            Default: 60.
    """

    worker_mtbf_h: float = declare(inf, "MTBF of a worker", check=unbounded)
    host_mtbf_h: float = declare(inf, "MTBF of a host", check=unbounded)
    coordinator_mtbf_h: float | None = declare(None, "MTBF of the coordinator", check=unbounded)
    detection_s: float = declare(1.0, "time to detection", check=not_negative)
    restart_s: float = declare(30.0, "restart of a worker", check=not_negative)
    run_restart_s: float = declare(60.0, "restart of the run", check=not_negative)

    @property
    def of_coordinator_per_h(self) -> float:
        """Failures of the coordinator's process per hour."""
        own_h = self.coordinator_mtbf_h
        return 1.0 / (self.worker_mtbf_h if own_h is None else own_h)


@dataclass(frozen=True, kw_only=True)
class Network(Settings):
    """Amount of data per update, and speed of the network.

    Args:
        engine: "processes" or "ray": all sums go to the coordinator, and the parameters from the
            coordinator to every host, over one link; with "ray" under "sync", each host first adds
            up the sums of its workers. "collective": hosts exchange slices with each other.
        gradient_bytes: size of a gradient, and of the parameters.
        bandwidth_bytes_per_s: bandwidth of a host's link, in each direction.
        ray_bytes_per_s: throughput of Ray itself with unlimited links: into its store, to the other
            host, and out. Adds to the time on the link.
        bisection_bytes_per_s: total bandwidth between the two halves of the hosts, in each
            direction.
        servers: number of parameter servers S, each with a slice of the parameters, on the hosts of
            workers. 0: the coordinator holds all parameters.
        latency_s: one-way latency of a message, in seconds.
        vector_s: time of the coordinator to receive and add one vector of sums, in seconds, in
            addition to the transfer.
    """

    engine: str = declare(
        "processes", "how workers run", check=lambda name, value: one_of(name, value, ENGINES)
    )
    gradient_bytes: float = declare(0.0, "size of a gradient", check=not_negative)
    bandwidth_bytes_per_s: float = declare(inf, "bandwidth of a host's link", check=unbounded)
    ray_bytes_per_s: float = declare(inf, "throughput of Ray", check=unbounded)
    bisection_bytes_per_s: float = declare(
        inf, "bandwidth between halves of the hosts", check=unbounded
    )
    servers: int = declare(0, "number of parameter servers", check=at_least(0))
    latency_s: float = declare(0.0, "one-way latency", check=not_negative)
    vector_s: float = declare(0.0, "time per vector of sums", check=not_negative)

    @property
    def link_s(self) -> float:
        """Seconds to send one gradient over a link."""
        return self.gradient_bytes / self.bandwidth_bytes_per_s

    @property
    def ray_s(self) -> float:
        """Seconds that Ray itself takes to move one gradient."""
        return self.gradient_bytes / self.ray_bytes_per_s if self.engine == "ray" else 0.0

    def require(self, rule: Rule, spares: int) -> None:
        """Check that the engine and its servers support a rule.

        Raises:
            SettingError: the engine does not.
        """
        if self.engine == "collective" and (rule.name != "sync" or spares):
            got = f"{rule.name} with {spares} spares"
            raise SettingError(
                "engine", "collective", f"sync without spares, not {got}", "choose ray"
            )
        if self.servers and self.engine != "ray":
            expected = f"none for engine {self.engine!r}"
            raise SettingError("servers", self.servers, expected, "take ray, or leave it out")

    def vectors(
        self, held: Mapping[int, int], shards: int, per_host: int, hosts: int, waits_for_all: bool
    ) -> int:
        """Return how many vectors of sums are sent for the shards of an update.

        Args:
            held: the worker that holds each shard, by shard.
            shards: V of the step.
            per_host: number of workers of a host; they have consecutive numbers.
            hosts: number of hosts.
            waits_for_all: whether the update needs all shards of the step.
        """
        if self.engine != "ray" or hosts == 1:
            return len({*held.values()})  # in the coordinator's memory, or added by each worker
        if self.servers or not waits_for_all:
            return len(held)  # to servers; or each alone, as any shard may be late
        return ownership.vectors({s: w // per_host for s, w in held.items()}, shards)

    def exchange_s(self, vectors: int, hosts: int) -> float:
        """Return the time of the exchange in an update, in seconds.

        Args:
            vectors: number of vectors of sums for the coordinator; with "collective", of ranks.
            hosts: number of hosts; a single host needs no link.
        """
        of_one_s = self.link_s + self.ray_s
        of_half_s = self.gradient_bytes / self.bisection_bytes_per_s
        elsewhere, is_cut = (hosts - 1) / hosts, hosts > 1
        if self.engine == "collective":
            # The ranks of a host add up their gradients, each rank a slice. Then hosts exchange the
            # sums of slices, and later the updated slices, both ways at once.
            # From each half of the hosts, H/2 slices of H/2 hosts cross the middle.
            slices_s = max(of_one_s * elsewhere, of_half_s * hosts / 4 * is_cut)
            return self.vector_s + 2 * (slices_s + self.latency_s * (vectors > 1))
        if self.servers:  # workers themselves wait for links
            return vectors * self.vector_s / self.servers
        # Sums arrive, at least one vector from each host with shards. After the update a copy of
        # the parameters leaves for each of these hosts. Half of the hosts are across the middle.
        copies = min(hosts, vectors)
        ins_s = max(vectors * elsewhere * of_one_s, vectors / 2 * of_half_s * is_cut)
        outs_s = max(copies * elsewhere * of_one_s, copies / 2 * of_half_s * is_cut)
        # With one shard per update, the next gradient arrives while the parameters leave.
        between_s = max(ins_s, outs_s) if vectors == 1 else ins_s + outs_s
        return vectors * self.vector_s + between_s


@dataclass(frozen=True, kw_only=True)
class Checkpoints(Settings):
    """Cost and interval of checkpoints.

    Args:
        stall_s: pause of the training loop for a checkpoint, in seconds. Default: 0.
        every_s: seconds between two checkpoints. None: the best interval. Default: None.
    """

    stall_s: float = declare(0.0, "pause for a checkpoint", check=not_negative)
    every_s: float | None = declare(None, "time between checkpoints", check=positive)
