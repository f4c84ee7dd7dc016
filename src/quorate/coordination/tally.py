"""The tally: counts of the fates of each worker's shards.

A shard counts once: when the update is made, or when the shard is known to be in no update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass
class Count:
    """The fates of a worker's shards."""

    fresh: int = 0  # applied to the parameters that they were computed from
    stale: int = 0  # applied after other updates had changed those
    dropped: int = 0  # in no update: the quorum was there before them
    copies: int = 0  # another worker was first with the same shard

    @property
    def begun(self) -> int:
        """Shards whose fate is known."""
        return self.fresh + self.stale + self.dropped + self.copies


class Tally:
    """Counts per worker, and the staleness of all applied gradients."""

    def __init__(self, saved: Mapping[str, Sequence[int]] | None = None) -> None:
        self._counts: list[Count] = []
        self.staleness_sum = self.staleness_max = 0
        if saved is not None:
            columns = [saved[name] for name in ("fresh", "stale", "dropped", "copies")]
            self._counts = [Count(*row) for row in zip(*columns, strict=True)]
            self.staleness_sum, self.staleness_max = saved["staleness"]

    def of(self, worker: int) -> Count:
        """Return the counts of a worker; those of lower numbers are there from then on too."""
        while len(self._counts) <= worker:
            self._counts.append(Count())
        return self._counts[worker]

    def applied(self, worker: int, staleness: int, shards: int = 1) -> None:
        """Count shards of a worker in an update, ``staleness`` updates after their parameters."""
        count = self.of(worker)
        if staleness:
            count.stale += shards
        else:
            count.fresh += shards
        self.staleness_sum += staleness * shards
        self.staleness_max = max(self.staleness_max, staleness)

    def lost(self, worker: int, *, dropped: bool) -> None:
        """Count a shard of a worker in no update: too late, or a copy."""
        if dropped:
            self.of(worker).dropped += 1
        else:
            self.of(worker).copies += 1

    def fates(self) -> tuple[list[int], list[int], list[int]]:
        """Return per worker how many shards were applied fresh, applied stale, and dropped."""
        counts = self._counts
        return (
            [count.fresh for count in counts],
            [count.stale for count in counts],
            [count.dropped for count in counts],
        )

    def to_json(self) -> dict[str, list[int]]:
        """Return counts per worker by fate; staleness: sum and max."""
        return {
            "fresh": [count.fresh for count in self._counts],
            "stale": [count.stale for count in self._counts],
            "dropped": [count.dropped for count in self._counts],
            "copies": [count.copies for count in self._counts],
            "staleness": [self.staleness_sum, self.staleness_max],
        }

    def summary(self) -> str:
        """Return ``staleness: mean 1.0, max 3; dropped: worker 2: 41 of 400``."""
        applied = sum(count.fresh + count.stale for count in self._counts)
        mean = self.staleness_sum / applied if applied else 0.0
        dropped = [
            f"worker {worker}: {count.dropped:,} of {count.begun:,}"
            for worker, count in enumerate(self._counts)
            if count.dropped
        ]
        return (
            f"staleness: mean {mean:.1f}, max {self.staleness_max:,}; "
            f"dropped: {', '.join(dropped) or 'none'}"
        )
