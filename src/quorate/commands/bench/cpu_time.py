"""CPU time: what this program and all its processes took, and what everyone took."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import psutil


class CpuTime(NamedTuple):
    """Seconds of cores so far."""

    own_s: float  # of this process, and of those that it started and that live
    all_s: float  # of all programs of this machine

    def others_s(self, since: CpuTime) -> float:
        """Return about what others took since then: a process of ours that ended is theirs."""
        return max(0.0, (self.all_s - since.all_s) - (self.own_s - since.own_s))


def cpu_time() -> CpuTime:
    """Return the times until now. It takes some milliseconds: it looks at all processes."""
    own_s = 0.0
    this = psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        with suppress(psutil.Error):  # it has ended meanwhile
            times = process.cpu_times()
            own_s += times.user + times.system
    everyone = psutil.cpu_times()
    # Linux counts guests in user and nice too.
    idle_s = everyone.idle + getattr(everyone, "iowait", 0.0)
    guests_s = getattr(everyone, "guest", 0.0) + getattr(everyone, "guest_nice", 0.0)
    return CpuTime(own_s, sum(everyone) - idle_s - guests_s)
