"""What a simulation is told: how long shards take, what goes wrong, what is sent, what is saved.

Units are in the names: ``_s`` seconds, ``_h`` hours, ``_bytes``. Each group checks itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isnan
from typing import Any

from quorate.errors import SettingError
from quorate.settings import Settings, about, one_of

ENGINES = ("processes", "ray", "collective")


def not_negative(name: str, value: object) -> float:
    """Check a number that may be 0, and infinite.

    Raises:
        SettingError: it is no number, or less than 0.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or isnan(value) or value < 0:  # type: ignore[arg-type, operator]
        raise SettingError(name, value, "a number >= 0", "choose another one")
    return float(value)  # type: ignore[arg-type]


def positive(name: str, value: object) -> float:
    """Check a number that may be infinite.

    Raises:
        SettingError: it is no number, or not above 0.
    """
    if not_negative(name, value) == 0.0:
        raise SettingError(name, value, "a number > 0", "choose a larger one")
    return float(value)  # type: ignore[arg-type]


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
    """

    mean_s: float = _field(1.0, positive, "mean")
    spread: float = _field(0.0, not_negative, "of a worker's times")
    work_spread: float = _field(0.0, not_negative, "of the shards themselves")
    measured_s: Sequence[float] = _field((), _times, "times to draw from")


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

    worker_mtbf_h: float = _field(inf, positive, "of a worker")
    host_mtbf_h: float = _field(inf, positive, "of a host")
    coordinator_mtbf_h: float | None = _field(None, positive, "of the coordinator")
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
            host, over its one link; collective: hosts exchange slices with each other.
        gradient_bytes: of one whole gradient; the parameters have as many.
        bandwidth_bytes_per_s: of a host's link, each way.
        latency_s: of a message, one way.
        vector_s: what one worker's sums cost the coordinator beside that: taking them in, adding
            them up.
    """

    engine: str = _field("processes", _engine, "how workers are reached")
    gradient_bytes: float = _field(0.0, not_negative, "of a gradient")
    bandwidth_bytes_per_s: float = _field(inf, positive, "of a link")
    latency_s: float = _field(0.0, not_negative, "of a message")
    vector_s: float = _field(0.0, not_negative, "per sum")

    def exchange_s(self, holders: int, hosts: int) -> float:
        """Return the seconds of an update that go into the exchange.

        Args:
            holders: workers that have sums of the step.
            hosts: that the workers are spread over; with one there is no link between.
        """
        of_one_s = self.gradient_bytes / self.bandwidth_bytes_per_s
        elsewhere = (hosts - 1) / hosts
        if self.engine == "collective":
            # A host's ranks add up what they have, each a slice. Then each host sends the others
            # their slices and gets its own, twice, both ways at once.
            between_s = 2 * (of_one_s * elsewhere + self.latency_s * (holders > 1))
            return self.vector_s + between_s
        # In and out at once, and more comes in than goes out: each worker's sums, which nobody adds
        # up on the way, against one copy of the parameters for each host.
        return holders * (self.vector_s + elsewhere * of_one_s)


@dataclass(frozen=True, kw_only=True)
class Checkpoints(Settings):
    """What is saved.

    Args:
        stall_s: how long the loop stands still for a checkpoint.
        every_s: between two of them; None: as often as is best.
    """

    stall_s: float = _field(0.0, not_negative, "of the loop")
    every_s: float | None = _field(None, positive, "between two")
