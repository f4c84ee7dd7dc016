"""Restarts: whether and when a worker that ended is started again. Pure: no clock, no process.

A worker that has computed a shard since it was started is started again at once, however often it
is killed. One that ends again and again before that is given more and more time, and then given up.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Restarts:
    """The budget of one worker's number.

    Args:
        killed: starts in a row that may end in a kill before anything was computed.
        failed: starts in a row that may end by themselves before anything was computed: the same
            script is likely to end in the same way again.
        longest_s: bound on the delay, which begins with 0.1 s and doubles.
    """

    killed: int = 20
    failed: int = 3
    longest_s: float = 5.0
    computed_in_all: int = 0  # shards
    in_vain: int = 0  # starts in a row that ended before anything was computed
    by_itself: int = 0  # of these, not killed

    def computed(self) -> None:
        """Note that it has computed a shard: it is no start in vain."""
        self.computed_in_all += 1
        self.in_vain = self.by_itself = 0

    def ended(self, *, killed: bool) -> float | None:
        """Return the seconds to wait before it is started again; None: give it up."""
        delay_s = 0.0 if self.in_vain == 0 else min(self.longest_s, 0.05 * 2.0**self.in_vain)
        self.in_vain += 1
        self.by_itself += not killed
        if self.in_vain > self.killed or self.by_itself >= self.failed:
            return None
        return delay_s
