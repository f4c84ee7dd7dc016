"""Cores and memory available to this process, by affinity and by the limits of a container.

The smallest limit of this process's control group and of all its parent groups counts. Both
versions of the kernel's interface are read (cgroup v1 and v2, and machines with both).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 60  # version 1 writes a number near 2**63 for "no limit"


def container_cores(root: Path = ROOT, membership: Path = MEMBERSHIP) -> float | None:
    """Return the group's limit of cores, possibly a fraction; None without a limit."""
    found = []
    for group in _groups("cpu", root, membership):
        try:
            if (group / "cpu.max").exists():
                quota, period = (group / "cpu.max").read_text().split()
            else:
                quota = (group / "cpu.cfs_quota_us").read_text().strip()
                period = (group / "cpu.cfs_period_us").read_text()
            if quota not in ("max", "-1"):
                found.append(int(quota) / int(period))
        except (OSError, ValueError, ZeroDivisionError):
            pass  # no such group, or a group without a controller of cores
    return min(found, default=None)


def memory_limit(root: Path = ROOT, membership: Path = MEMBERSHIP) -> int | None:
    """Return the group's limit of memory in bytes; None without a limit."""
    found = []
    for group in _groups("memory", root, membership):
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                most = (group / name).read_text().strip()
                if most != "max" and int(most) <= _NO_LIMIT:
                    found.append(int(most))
            except (OSError, ValueError):
                pass
    return min(found, default=None)


def memory_left(root: Path = ROOT, membership: Path = MEMBERSHIP) -> int | None:
    """Return the bytes left to the group; None without a limit."""
    found = []
    for group in _groups("memory", root, membership):
        try:
            if (group / "memory.max").exists():
                names = ("memory.max", "memory.current", "inactive_file")
            else:
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            most = (group / names[0]).read_text().strip()
            if most == "max" or int(most) > _NO_LIMIT:
                continue
            lines = (group / "memory.stat").read_text().splitlines()
            stat = dict(line.split() for line in lines)
            used = int((group / names[1]).read_text())
            found.append(int(most) - used + int(stat.get(names[2], 0)))
        except (OSError, ValueError):
            pass
    return max(0, min(found)) if found else None


def oom_kills(
    root: Path = ROOT, membership: Path = MEMBERSHIP, vmstat: Path = Path("/proc/vmstat")
) -> int:
    """Return a count that rises when the kernel kills a process for memory; 0 if unavailable.

    The count is of this process's control group, for any limit reached: other processes of the
    machine may run out of memory too. Without a group, the count of the whole machine is returned.
    """
    groups = _groups("memory", root, membership)
    files = (group / name for group in groups for name in ("memory.events", "memory.oom_control"))
    for file in (*files, vmstat):
        try:
            entries = dict(line.split() for line in file.read_text().splitlines())
            return int(entries["oom_kill"])
        except (OSError, ValueError, KeyError):
            pass  # no such group, or an old kernel
    return 0


def _groups(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """Yield this process's group and its parents, as far as they are visible."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if controllers == "":
            bases = [root, root / "unified"]
        elif controller in controllers.split(","):
            bases = [root / controllers, root / controller]
        else:
            continue
        for base in bases:
            group = base / own.lstrip("/")
            # In a container the name may be the machine's, while the root is the container's own
            # group.
            yield from (g for g in (group, *group.parents) if g == base or base in g.parents)


MOST_CPU_WORKERS = 8


def usable_cores() -> int:
    """Return the number of cores for this process, by affinity and by its container's limit."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    limit = _cores_limit()
    return cores if limit is None else max(1, min(cores, int(limit)))


@cache
def _cores_limit() -> float | None:
    return container_cores()  # cached: reads files, and is called in every update


def most_memory() -> int | None:
    """Return the bytes of memory available now; None if the system does not report them.

    The container's current use is not subtracted: most of it may be cached files, which the kernel
    drops when memory is needed.
    """
    import psutil  # not by those who only look at a run

    found = [memory_limit()]
    # psutil fails if /proc is missing or has another format.
    with suppress(OSError, ValueError, LookupError, NotImplementedError, RuntimeError):
        found.append(psutil.virtual_memory().available)
    return min((nbytes for nbytes in found if nbytes is not None), default=None)


def too_large(nbytes: int) -> str:
    """Return why so many bytes cannot be read into memory, or an empty text."""
    most = most_memory()
    if most is None or nbytes <= most:
        return ""
    return f"{nbytes:,} bytes, and {most:,} bytes of memory can be had"
