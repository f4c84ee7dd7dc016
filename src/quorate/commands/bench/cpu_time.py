"""CPU time of this program with its child processes, and of all programs."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import psutil


class CpuTime(NamedTuple):
    """Seconds of CPU time so far, summed over cores."""

    own_s: float  # of this process and its living descendants
    all_s: float  # of all programs of this machine

    def others_s(self, since: CpuTime) -> float:
        """Return the approximate CPU time of unrelated programs since an earlier reading.

        The time of a child process that has ended counts as unrelated.
        """
        return max(0.0, (self.all_s - since.all_s) - (self.own_s - since.own_s))


def cpu_time() -> CpuTime:
    """Return the times until now. Takes some milliseconds, to read all descendants."""
    own_s = 0.0
    this = psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        with suppress(psutil.Error):  # the process has ended meanwhile
            times = process.cpu_times()
            own_s += times.user + times.system
    everyone = psutil.cpu_times()
    # Linux includes guests in user and nice too.
    idle_s = everyone.idle + getattr(everyone, "iowait", 0.0)
    guests_s = getattr(everyone, "guest", 0.0) + getattr(everyone, "guest_nice", 0.0)
    return CpuTime(own_s, sum(everyone) - idle_s - guests_s)
