"""The tally: counts of the fates of each worker's shards.

A shard counts once: when the update is made, or when the shard is known to be in no update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FATES = (
    "fresh",  # applied to the parameters that the shard was computed from
    "stale",  # applied after other updates had changed those parameters
    "dropped",  # in no update: the quorum was complete before
    "copies",  # in no update: another worker was first with the same shard
)


class Tally:
    """Counts of shards per worker and fate, and the staleness of all applied gradients.

    Args:
        saved: a result of ``to_json``.
    """

    def __init__(self, saved: Mapping[str, Sequence[int]] | None = None) -> None:
        saved = saved or {}
        self.counts = {fate: [*saved.get(fate, ())] for fate in FATES}  # by worker
        self.staleness_sum, self.staleness_max = saved.get("staleness", (0, 0))

    def include(self, worker: int) -> None:
        """Begin to count a worker, and all workers of lower numbers."""
        for counts in self.counts.values():
            counts += [0] * (worker + 1 - len(counts))

    def applied(self, worker: int, staleness: int) -> None:
        """Count a shard of a worker in an update, ``staleness`` updates after its parameters."""
        self._count(worker, "stale" if staleness else "fresh")
        if staleness:
            self.staleness_sum += staleness
            self.staleness_max = max(self.staleness_max, staleness)

    def lost(self, worker: int, *, dropped: bool) -> None:
        """Count a shard of a worker in no update: too late, or a copy."""
        self._count(worker, "dropped" if dropped else "copies")

    def _count(self, worker: int, fate: str) -> None:
        counts = self.counts[fate]
        if worker >= len(counts):
            self.include(worker)
        counts[worker] += 1

    def to_json(self) -> dict[str, list[int]]:
        """Return counts per worker by fate; staleness: sum and max."""
        counts = {fate: [*counts] for fate, counts in self.counts.items()}
        return counts | {"staleness": [self.staleness_sum, self.staleness_max]}

    def summary(self) -> str:
        """Return ``staleness: mean 1.0, max 3; dropped: worker 2: 41 of 400``."""
        begun = [sum(fates) for fates in zip(*self.counts.values(), strict=True)]
        applied = sum(self.counts["fresh"]) + sum(self.counts["stale"])
        mean = self.staleness_sum / applied if applied else 0.0
        dropped = [
            f"worker {worker}: {count:,} of {begun[worker]:,}"
            for worker, count in enumerate(self.counts["dropped"])
            if count
        ]
        return (
            f"staleness: mean {mean:.1f}, max {self.staleness_max:,}; "
            f"dropped: {', '.join(dropped) or 'none'}"
        )
