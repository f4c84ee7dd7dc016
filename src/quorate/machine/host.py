"""Cores and memory of this machine, and what a container may have of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from quorate.machine import container


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


def host() -> Host:
    """Return what this machine has, and what this process may have of it."""
    memory = _or_none(psutil.virtual_memory)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    cores = os.cpu_count() or 1
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    return Host(
        processor=_processor(),
        cores=cores,
        cores_physical=_or_none(partial(psutil.cpu_count, logical=False)),
        cores_allowed=allowed or cores,
        cores_limit=container.cores(),
        numa_nodes=max(1, len(nodes)),
        memory_bytes=None if memory is None else memory.total,
        memory_free_bytes=None if memory is None else memory.available,
        container_free_bytes=container.memory_left(),
    )


def _or_none(ask: Callable[[], Any]) -> Any:
    """Return an answer, or None where /proc or /sys is not there, or has another form."""
    try:
        return ask()
    except (OSError, ValueError, LookupError, NotImplementedError, RuntimeError):
        return None


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None)
