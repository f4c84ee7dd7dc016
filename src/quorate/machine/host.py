"""Cores and memory of this machine, and the share available to a container."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from quorate.machine.resources import container_cores, memory_left

MIB = 1 << 20
# Measured with a small model: 222 MiB, and 55 MiB per worker.
MEMORY_BYTES, MEMORY_PER_WORKER_BYTES = 256 * MIB, 64 * MIB


class Shortage(NamedTuple):
    """A shortage of a resource for a run."""

    what: str  # the resource, with the figures
    cure: str


@dataclass(frozen=True)
class Host:
    """Cores and memory of a machine, and the share available to this process."""

    processor: str | None
    cores: int  # logical cores of the machine
    cores_physical: int | None
    cores_allowed: int  # by affinity: cpuset, taskset
    cores_limit: float | None  # limit of the container: cpu.max, cfs_quota
    numa_nodes: int
    memory_bytes: int | None  # None: unknown
    memory_free_bytes: int | None
    container_free_bytes: int | None  # left under the container's limit, if there is one

    @property
    def cores_usable(self) -> float:
        """The number of cores that may be used at a time."""
        limit = self.cores_allowed if self.cores_limit is None else self.cores_limit
        return min(self.cores_allowed, limit)

    def too_few_cores(self, workers: int, threads: int, devices: int = 1) -> Shortage | None:
        """Return the shortage of cores for CPU workers with threads; None if cores suffice.

        Args:
            devices: CPUs per worker, which compute at the same time.
        """
        if workers * devices * threads <= max(1.0, self.cores_usable):
            return None
        each = f"{threads} thread{'s' if threads > 1 else ''}"
        cores = f"{self.cores_usable:g} core{'s' if self.cores_usable > 1 else ''}"
        who = f"{workers} worker{'' if workers == 1 else 's'}"
        if devices > 1:
            who += f" of {devices} devices"
            cure = "use fewer devices for each worker, or lower --workers"
        else:
            cure = "lower --workers or --threads"
        return Shortage(f"{who} x {each} on {cores}: workers wait for one another", cure)

    def too_little_memory(self, workers: int) -> Shortage | None:
        """Return the shortage of memory for worker processes with the smallest model, or None."""
        known = [b for b in (self.container_free_bytes, self.memory_free_bytes) if b is not None]
        free, need = min(known, default=None), MEMORY_BYTES + workers * MEMORY_PER_WORKER_BYTES
        if free is None or free >= need:
            return None
        whose = "of the machine" if free == self.memory_free_bytes else "to the container"
        return Shortage(
            f"{free / MIB:,.0f} MiB are left {whose}, and a run with {workers} "
            f"worker{'' if workers == 1 else 's'} takes {need / MIB:,.0f} MiB even with a "
            "tiny model",
            "end other programs, raise the container's limit, or lower --workers",
        )


def host() -> Host:
    """Return the resources of this machine, and the share available to this process."""
    memory = _or_none(psutil.virtual_memory)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    cores = os.cpu_count() or 1
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    return Host(
        processor=processor_field("model name"),
        cores=cores,
        cores_physical=_or_none(partial(psutil.cpu_count, logical=False)),
        cores_allowed=allowed or cores,
        cores_limit=container_cores(),
        numa_nodes=max(1, len(nodes)),
        memory_bytes=None if memory is None else memory.total,
        memory_free_bytes=None if memory is None else memory.available,
        container_free_bytes=memory_left(),
    )


def _or_none(ask: Callable[[], Any]) -> Any:
    """Return the result of a call, or None if /proc or /sys is missing or has another format."""
    try:
        return ask()
    except (OSError, ValueError, LookupError, NotImplementedError, RuntimeError):
        return None


def processor_field(field: str) -> str | None:
    """Return a field of the first processor in /proc/cpuinfo; None if the system has no such."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return None
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(field))
    return next(values, None)
