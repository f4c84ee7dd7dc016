"""Cores and memory of this machine, and what a container may have of them."""

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
# Of a small model: 222 MiB and 55 per worker.
MEMORY_BYTES, MEMORY_PER_WORKER_BYTES = 256 * MIB, 64 * MIB


class Shortage(NamedTuple):
    """What a machine has too little of for a run."""

    what: str  # with the figures
    cure: str


@dataclass(frozen=True)
class Host:
    """Cores and memory of a machine, and what this process may have of them."""

    processor: str | None
    cores: int  # of the machine, logical
    cores_physical: int | None
    cores_allowed: int  # by affinity: cpuset, taskset
    cores_limit: float | None  # of the container: cpu.max, cfs_quota
    numa_nodes: int
    memory_bytes: int | None  # None: the system does not say
    memory_free_bytes: int | None
    container_free_bytes: int | None  # of the container's limit, if there is one

    @property
    def cores_usable(self) -> float:
        """How many cores may be used at a time."""
        limit = self.cores_allowed if self.cores_limit is None else self.cores_limit
        return min(self.cores_allowed, limit)

    def too_few_cores(self, workers: int, threads: int, devices: int = 1) -> Shortage | None:
        """Return what to say of so many CPU workers, each with so many threads; None: nothing.

        Args:
            devices: CPUs of each worker, which compute at the same time.
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
        """Return what to say of so many worker processes, with the smallest of models."""
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
    """Return what this machine has, and what this process may have of it."""
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
    """Return an answer, or None where /proc or /sys is not there, or has another form."""
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
