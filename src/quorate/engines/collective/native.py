"""The native exchange: torch.distributed's own reduce-scatter and all-gather, bucket by bucket.

The order of additions, and so the bits, depend on the number of ranks. The native exchange serves
to measure the cost of the ordered sum. (The reduce-scatter of gloo sends as many bytes as an
all-reduce: twice as many as necessary.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quorate.coordination.tree import Node
from quorate.engines.collective.exchange import GradientExchange
from quorate.engines.collective.gradient_buckets import Bucket
from quorate.engines.collective.rank_control import in_turn
from quorate.replica.flat import Flat


class NativeExchange(GradientExchange):
    """The exchange of vectors by torch.distributed."""

    def open(self, parameters: Flat, *, by_owners: bool = False) -> None:  # noqa: ARG002
        """Make memory for gradients: see ``GradientExchange``. Ranks share no parameters."""
        super().open(parameters)  # torch.distributed writes all parameters on each rank

    def sum(self, shards: int, *, waits: bool = True) -> Flat:
        """Return this rank's slices of the sum over a step's shards: see ``GradientExchange``."""
        if self.dealt(shards)[self.ranks.rank] is None:
            for vector in self.gradient_buckets.vectors:
                vector.zero_()
        return super().sum(shards, waits=waits)

    def _begin(
        self,
        number: int,
        dealt: Sequence[Node | None],  # noqa: ARG002
        shards: int,  # noqa: ARG002
    ) -> Callable[[], None]:
        bucket, ranks = self.buckets[number], range(self.ranks.size)
        parts = [bucket.part(self.gradient_buckets, rank) for rank in ranks]
        return self.ranks.begin(lambda group: group.begin_sum(parts, self._total.vectors[number]))

    def spread(self, whole: Flat) -> None:
        """Copy the slices of each rank to the whole vectors of all ranks. Blocks."""
        in_turn(self._begin_spread(bucket, whole) for bucket in self.buckets)

    def _begin_spread(self, bucket: Bucket, whole: Flat) -> Callable[[], None]:
        """Begin to spread a bucket. Returns a function to wait for the end."""
        me, ranks = self.ranks.rank, range(self.ranks.size)
        parts = [bucket.part(whole, rank) for rank in ranks]
        if all(len(part) == len(parts[0]) for part in parts):
            return self.ranks.begin(lambda group: group.begin_gather(parts[me], parts))
        # Not every backend accepts parts of several lengths.
        others = [rank for rank in ranks if rank != me]
        sends = [(rank, parts[me]) for rank in others]
        return self.ranks.begin_swap(sends, [(rank, parts[rank]) for rank in others])
