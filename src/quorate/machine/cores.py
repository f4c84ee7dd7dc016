"""Cores: how many this process may use, and how many CPU workers a run starts by itself."""

from __future__ import annotations

import os
from functools import cache

from quorate.machine import container

MOST_CPU_WORKERS = 8


def usable_cores() -> int:
    """Return how many cores this process may run on, by affinity and by its container's limit."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    limit = _container_cores()
    return cores if limit is None else max(1, min(cores, int(limit)))


@cache
def _container_cores() -> float | None:
    return container.cores()  # it reads files, and an update asks
