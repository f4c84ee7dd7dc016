"""What a simulation is told: how long shards take, what goes wrong, what is sent, what is saved.

Units are in the names: ``_s`` seconds, ``_h`` hours, ``_bytes``. Each group checks itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isnan
from typing import Any

from quorate.coordination import host_sums
from quorate.coordination.rules import Rule
from quorate.errors import SettingError
from quorate.settings import Settings, about, one_of, whole

ENGINES = ("processes", "ray", "collective")
MOST = 1e12  # of a number that is to be finite: of bytes a terabyte, of seconds 30,000 years
WIDEST = 3.0  # spread: of a wider one the mean is in times that are never drawn


def not_negative(name: str, value: object, most: float = MOST) -> float:
    """Check a number that may be 0.

    Raises:
        SettingError: it is no number, less than 0, or above ``most``.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or isnan(value) or value < 0:  # type: ignore[arg-type, operator]
        raise SettingError(name, value, "a number >= 0", "choose another one")
    if value > most:  # type: ignore[operator]
        raise SettingError(name, value, f"a number <= {most:g}", "choose a smaller one")
    return float(value)  # type: ignore[arg-type]


def positive(name: str, value: object, most: float = MOST) -> float:
    """Check a number above 0.

    Raises:
        SettingError: it is no number, not above 0, or above ``most``.
    """
    if not_negative(name, value, most) == 0.0:
        raise SettingError(name, value, "a number > 0", "choose a larger one")
    return float(value)  # type: ignore[arg-type]


def unbounded(name: str, value: object) -> float:
    """Check a number above 0 that may be infinite.

    Raises:
        SettingError: it is no number, or not above 0.
    """
    return positive(name, value, inf)


def deviation(name: str, value: object) -> float:
    """Check the standard deviation of a logarithm.

    Raises:
        SettingError: it is no number, less than 0, or above ``WIDEST``.
    """
    return not_negative(name, value, WIDEST)


def share(name: str, value: object) -> float:
    """Check a probability, or a part of a whole.

    Raises:
        SettingError: it is none.
    """
    if not_negative(name, value) > 1.0:
        raise SettingError(name, value, "a number >= 0 and <= 1", "choose a smaller one")
    return float(value)  # type: ignore[arg-type]


def at_least_one(name: str, value: object) -> float:
    """Check how many times as long something takes.

    Raises:
        SettingError: it is less than 1.
    """
    if not_negative(name, value) < 1.0:
        raise SettingError(name, value, "a number >= 1: times as long", "choose a larger one")
    return float(value)  # type: ignore[arg-type]


def _times(name: str, value: Sequence[Any]) -> tuple[float, ...]:
    return tuple(positive(name, second) for second in value)


def _engine(name: str, value: str) -> str:
    return one_of(name, value, ENGINES)


def _cores(name: str, value: int | None) -> int | None:
    return None if value is None else whole(name, value, least=1)


def _threads(name: str, value: int) -> int:
    return whole(name, value, least=1)


def _servers(name: str, value: int) -> int:
    return whole(name, value, least=0)


def _field(default: Any, check: Any, help: str) -> Any:
    return field(default=default, metadata=about(help, check=check))


@dataclass(frozen=True, kw_only=True)
class ShardTimes(Settings):
    """How long a shard takes a worker, all of it: its rows, forward, backward, handing over.

    Args:
        mean_s: the mean.
        spread: standard deviation of the logarithm, lognormal, drawn anew for each shard that a
            worker computes. 0: all take the mean.
        work_spread: the same of the shards themselves: rows that are longer take whoever computes
            them longer, and another worker is no remedy.
        measured_s: times that were measured, of which one is drawn each time, in the place of mean
            and spread.
        leaves_off_s: until a worker leaves off a shard that is not wanted any more: it looks
            between two phases. One that is slower takes as many times as long.
    """

    mean_s: float = _field(1.0, positive, "mean")
    spread: float = _field(0.0, deviation, "of a worker's times")
    work_spread: float = _field(0.0, deviation, "of the shards themselves")
    measured_s: Sequence[float] = _field((), _times, "times to draw from")
    leaves_off_s: float = _field(0.01, not_negative, "until a shard is left off")


@dataclass(frozen=True, kw_only=True)
class Stragglers(Settings):
    """Who is slow, beside the spread of shard times.

    Args:
        probability: that a shard is held up, each time anew: transient.
        factor: times as long as it then takes.
        extra_s: seconds on top of that.
        slow_workers: share of the workers that are slower than others all the time: steady.
        slow_factor: times as long as each of their shards takes.
        slow_hosts: share of the hosts that are, with all of their workers.
        slow_host_factor: times as long as each of those shards takes.
        steady: times as long as each worker's shards take, one number per worker; those beyond its
            end take once as long.
    """

    probability: float = _field(0.0, share, "of being held up")
    factor: float = _field(1.0, at_least_one, "times as long")
    extra_s: float = _field(0.0, not_negative, "seconds more")
    slow_workers: float = _field(0.0, share, "share of slow workers")
    slow_factor: float = _field(1.0, at_least_one, "times as long")
    slow_hosts: float = _field(0.0, share, "share of slow hosts")
    slow_host_factor: float = _field(1.0, at_least_one, "times as long")
    steady: Sequence[float] = _field((), _times, "times as long, by worker")


@dataclass(frozen=True, kw_only=True)
class Cores(Settings):
    """The cores of a host, which its workers share, and the coordinator while it updates.

    Args:
        per_host: of each host; None: as many as there are threads, so that nothing is shared.
        threads: of each worker.
        crowding: times as long as alone a shard takes where all cores compute: memory, caches and
            the clock are shared too.
    """

    per_host: int | None = _field(None, _cores, "of a host")
    threads: int = _field(1, _threads, "of a worker")
    crowding: float = _field(1.0, at_least_one, "times as long")

    def times(self, workers: int) -> float:
        """Return how many times as long a shard takes while so many of a host compute."""
        if self.per_host is None:
            return 1.0
        wanted = workers * self.threads
        others = min(1.0, (wanted - 1) / (self.per_host - 1)) if self.per_host > 1 else 0.0
        return max(1.0, wanted / self.per_host) * (1.0 + (self.crowding - 1.0) * others)

    def start_times(self, workers: int) -> float:
        """Return how many times as long the start of one takes, while the others compute."""
        if self.per_host is None:
            return 1.0
        return max(1.0, ((workers - 1) * self.threads + 1) / self.per_host)


@dataclass(frozen=True, kw_only=True)
class Failures(Settings):
    """What fails, at moments that do not depend on each other: exponential times between them.

    Args:
        worker_mtbf_h: mean time between failures of one worker.
        host_mtbf_h: of one host, which takes all of its workers along.
        coordinator_mtbf_h: of the coordinator's process; None: as of a worker's.
        detection_s: until a failure is known.
        restart_s: after that, until the worker or host is back.
        run_restart_s: until the whole run goes on, where it had to begin again.
    """

    worker_mtbf_h: float = _field(inf, unbounded, "of a worker")
    host_mtbf_h: float = _field(inf, unbounded, "of a host")
    coordinator_mtbf_h: float | None = _field(None, unbounded, "of the coordinator")
    detection_s: float = _field(1.0, not_negative, "until it is known")
    restart_s: float = _field(30.0, not_negative, "until a worker is back")
    run_restart_s: float = _field(60.0, not_negative, "until the run goes on")

    @property
    def of_coordinator_per_h(self) -> float:
        """Failures of the coordinator's process per hour."""
        own_h = self.coordinator_mtbf_h
        return 1.0 / (self.worker_mtbf_h if own_h is None else own_h)


@dataclass(frozen=True, kw_only=True)
class Network(Settings):
    """What is sent for an update, and how fast.

    Args:
        engine: processes or ray: all sums go to the coordinator, and parameters from it to every
            host, over its one link, with ray under sync what a host's workers have added up;
            collective: hosts exchange slices with each other.
        gradient_bytes: of one whole gradient; the parameters have as many.
        bandwidth_bytes_per_s: of a host's link, each way.
        ray_bytes_per_s: what Ray itself moves where links have no bound: into its store, over, and
            out of it. It comes on top of what the link takes.
        bisection_bytes_per_s: of all links together between one half of the hosts and the other,
            each way.
        servers: S, that have a slice each of the parameters, on hosts of workers; 0: the
            coordinator has all of them.
        latency_s: of a message, one way.
        vector_s: what a vector of sums costs the coordinator beside that: taking it in, adding it
            up.
    """

    engine: str = _field("processes", _engine, "how workers are reached")
    gradient_bytes: float = _field(0.0, not_negative, "of a gradient")
    bandwidth_bytes_per_s: float = _field(inf, unbounded, "of a link")
    ray_bytes_per_s: float = _field(inf, unbounded, "by Ray itself")
    bisection_bytes_per_s: float = _field(inf, unbounded, "between halves of the hosts")
    servers: int = _field(0, _servers, "with a slice each")
    latency_s: float = _field(0.0, not_negative, "of a message")
    vector_s: float = _field(0.0, not_negative, "per sum")

    @property
    def link_s(self) -> float:
        """Seconds that a link takes for one whole gradient."""
        return self.gradient_bytes / self.bandwidth_bytes_per_s

    @property
    def ray_s(self) -> float:
        """Seconds that Ray itself takes for one."""
        return self.gradient_bytes / self.ray_bytes_per_s if self.engine == "ray" else 0.0

    def require(self, rule: Rule, spares: int) -> None:
        """Check that there is such an engine, with such servers, under a rule.

        Raises:
            SettingError: there is not.
        """
        if self.engine == "collective" and (rule.name != "sync" or spares):
            got = f"{rule.name} with {spares} spares"
            raise SettingError(
                "engine", "collective", f"sync without spares, not {got}", "choose ray"
            )
        if self.servers and (self.engine != "ray" or rule.by_shard):
            got = f"{self.engine} under {rule.name}"
            raise SettingError(
                "servers", self.servers, f"ray under sync or quorum, not {got}", "leave it out"
            )

    def vectors(
        self, held: Mapping[int, int], shards: int, per_host: int, hosts: int, waits_for_all: bool
    ) -> int:
        """Return how many vectors of sums an update's shards are when they are sent.

        Args:
            held: the worker that has each shard, by the shard.
            shards: V of the step.
            per_host: workers of a host, neighbours.
            hosts: that the workers are spread over.
            waits_for_all: whether the step has no update before all shards are there.
        """
        if self.engine != "ray" or hosts == 1:
            return len({*held.values()})  # they are in the coordinator's memory, or come as one
        if self.servers or not waits_for_all:
            return len(held)  # each goes to servers; or nobody knows which will be in the update
        return host_sums.vectors({s: w // per_host for s, w in held.items()}, shards)

    def exchange_s(self, vectors: int, hosts: int) -> float:
        """Return the seconds of an update that go into the exchange.

        Args:
            vectors: of sums that go to the coordinator; with collective: ranks.
            hosts: that the workers are spread over; with one there is no link between.
        """
        of_one_s = self.link_s + self.ray_s
        of_half_s = self.gradient_bytes / self.bisection_bytes_per_s
        elsewhere, is_cut = (hosts - 1) / hosts, hosts > 1
        if self.engine == "collective":
            # A host's ranks add up what they have, each a slice. Then each host sends the others
            # their slices and gets its own, twice, both ways at once.
            # Of each half's H/2 slices from H/2 hosts all cross the middle.
            slices_s = max(of_one_s * elsewhere, of_half_s * hosts / 4 * is_cut)
            return self.vector_s + 2 * (slices_s + self.latency_s * (vectors > 1))
        if self.servers:  # what goes through links, workers wait for by themselves
            return vectors * self.vector_s / self.servers
        # First sums come in, at least one vector of each host that computed; after the update a
        # copy of the parameters goes out to each such host. Half of the hosts are on the other
        # side.
        copies = min(hosts, vectors)
        ins_s = max(vectors * elsewhere * of_one_s, vectors / 2 * of_half_s * is_cut)
        outs_s = max(copies * elsewhere * of_one_s, copies / 2 * of_half_s * is_cut)
        # An update of one shard: what comes in for the next one does so while parameters go out.
        between_s = max(ins_s, outs_s) if vectors == 1 else ins_s + outs_s
        return vectors * self.vector_s + between_s


@dataclass(frozen=True, kw_only=True)
class Checkpoints(Settings):
    """What is saved.

    Args:
        stall_s: how long the loop stands still for a checkpoint.
        every_s: between two of them; None: as often as is best.
    """

    stall_s: float = _field(0.0, not_negative, "of the loop")
    every_s: float | None = _field(None, positive, "between two")
