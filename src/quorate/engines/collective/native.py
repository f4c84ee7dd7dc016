"""The native exchange: torch.distributed's own reduce-scatter and all-gather, bucket by bucket.

The order of additions, and so the bits, depend on the number of ranks. The native exchange serves
to measure the cost of the ordered sum. (The reduce-scatter of gloo sends as many bytes as an
all-reduce: twice as many as necessary.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from quorate.engines.collective.exchange import GradientExchange
from quorate.engines.collective.rank_control import MOST_UNDER_WAY, TensorTransfer
from quorate.replica.flat import Flat


class NativeExchange(GradientExchange):
    """The exchange of vectors by torch.distributed."""

    def open(self, parameters: Flat, *, by_owners: bool = False) -> None:  # noqa: ARG002
        """Make memory for gradients: see ``GradientExchange``. Each rank has its own parameters."""
        super().open(parameters)  # torch.distributed writes all parameters on each rank

    def sum(self, shards: int, *, waits: bool = True) -> Flat:
        """Return this rank's slices of the sum over a step's shards: see ``GradientExchange``."""
        owns = self.dealt(shards)[self.ranks.rank] is not None
        if not owns:
            for vector in self.gradient_buckets.vectors:
                vector.zero_()
        under_way: deque[TensorTransfer] = deque()
        with self._beside():
            for number in self.order:
                if waits and owns:
                    self.gradient_buckets.wait(number)
                bucket = self.slices.buckets[number]
                ranks = range(self.ranks.size)
                parts = [bucket.part(self.gradient_buckets, rank) for rank in ranks]
                under_way.append(self.ranks.begin_sum(parts, self._pieces[number]))
                if len(under_way) > MOST_UNDER_WAY:
                    under_way.popleft().wait()
            for transfer in under_way:
                transfer.wait()
        return self._total

    def spread(self, whole: Flat) -> None:
        """Copy the slices that each rank owns to the whole vectors of all ranks. Blocks."""
        under_way: deque[Callable[[], None]] = deque()
        for bucket in self.slices.buckets:
            parts = [bucket.part(whole, rank) for rank in range(self.ranks.size)]
            under_way.append(self._begin_spread(parts))
            if len(under_way) > MOST_UNDER_WAY:
                under_way.popleft()()
        for end in under_way:
            end()

    def _begin_spread(self, parts: list[torch.Tensor]) -> Callable[[], None]:
        """Begin to spread a bucket. Returns a function that ends the transfer, and blocks."""
        own, longest = parts[self.ranks.rank], max(part.numel() for part in parts)
        if all(part.numel() == longest for part in parts):
            return self.ranks.begin_spread(own, parts).wait
        # Not every backend accepts parts of several lengths.
        padded = own.new_zeros(longest)
        padded[: own.numel()] = own
        taken = [torch.empty_like(padded) for _ in parts]
        transfer = self.ranks.begin_spread(padded, taken)

        def end() -> None:
            transfer.wait()
            for part, other in zip(parts, taken, strict=True):
                part.copy_(other[: part.numel()])

        return end
