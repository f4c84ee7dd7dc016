"""The native exchange: torch.distributed's own reduce-scatter and all-gather, bucket by bucket.

Its sums are in an order that depends on the number of ranks, and so do their bits. It is there to
measure what the other order costs.
"""

from __future__ import annotations

from collections import deque

import torch

from quorate.replica.flat import Flat
from quorate.transports.collective.exchange import MOST_UNDER_WAY, Exchange
from quorate.transports.collective.ranks import Swap


class NativeExchange(Exchange):
    """What ranks send each other, as torch.distributed does it."""

    def sum(self, shards: int, *, waits: bool = True) -> Flat:
        """Return this rank's slices of the sum over a step's shards: see ``Exchange``."""
        owns = self.dealt(shards)[self.ranks.rank] is not None
        if not owns:
            for vector in self.outbox.vectors:
                vector.zero_()
        under_way: deque[Swap] = deque()
        with self._beside():
            for number in self.order:
                if waits and owns:
                    self.outbox.wait(number)
                bucket = self.slices.buckets[number]
                parts = [bucket.part(self.outbox, rank) for rank in range(self.ranks.size)]
                under_way.append(self.ranks.begin_sum(parts, self._pieces[number]))
                if len(under_way) > MOST_UNDER_WAY:
                    under_way.popleft().wait()
            for swap in under_way:
                swap.wait()
        return self._total

    def spread(self, whole: Flat) -> None:
        """Have all ranks get the slices that each has in its own whole vectors. Blocks."""
        for bucket in self.slices.buckets:
            parts = [bucket.part(whole, rank) for rank in range(self.ranks.size)]
            most = max(part.numel() for part in parts)
            # Parts of one length, as not every backend takes others.
            own = parts[self.ranks.rank].new_zeros(most)
            own[: parts[self.ranks.rank].numel()] = parts[self.ranks.rank]
            taken = torch.empty(most * len(parts), dtype=own.dtype, device=own.device)
            self.ranks.spread(own, taken)
            for part, other in zip(parts, torch.split(taken, most), strict=True):
                part.copy_(other[: part.numel()])
