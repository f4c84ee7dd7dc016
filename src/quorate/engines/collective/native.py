"""The native exchange: torch.distributed's own reduce-scatter and all-gather, bucket by bucket.

Its sums are in an order that depends on the number of ranks, and so do their bits. It is there to
measure what the other order costs. (gloo's reduce-scatter sends as much as its all-reduce, twice
what it would have to.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from quorate.engines.collective.exchange import GradientExchange
from quorate.engines.collective.rank_control import MOST_UNDER_WAY, TensorTransfer
from quorate.replica.flat import Flat


class NativeExchange(GradientExchange):
    """What ranks send each other, as torch.distributed does it."""

    def open(self, parameters: Flat, *, by_owners: bool = False) -> None:  # noqa: ARG002
        """Make memory for gradients: see ``GradientExchange``. Each rank has its own parameters."""
        super().open(parameters)  # torch.distributed writes to all of them, also what is there

    def sum(self, shards: int, *, waits: bool = True) -> Flat:
        """Return this rank's slices of the sum over a step's shards: see ``GradientExchange``."""
        owns = self.dealt(shards)[self.ranks.rank] is not None
        if not owns:
            for vector in self.outbox.vectors:
                vector.zero_()
        under_way: deque[TensorTransfer] = deque()
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
        under_way: deque[Callable[[], None]] = deque()
        for bucket in self.slices.buckets:
            parts = [bucket.part(whole, rank) for rank in range(self.ranks.size)]
            under_way.append(self._begin_spread(parts))
            if len(under_way) > MOST_UNDER_WAY:
                under_way.popleft()()
        for end in under_way:
            end()

    def _begin_spread(self, parts: list[torch.Tensor]) -> Callable[[], None]:
        """Begin to spread a bucket; what is returned ends that, and blocks."""
        own, most = parts[self.ranks.rank], max(part.numel() for part in parts)
        if all(part.numel() == most for part in parts):
            return self.ranks.begin_spread(own, parts).wait
        # Not every backend takes parts of several lengths.
        padded = own.new_zeros(most)
        padded[: own.numel()] = own
        taken = [torch.empty_like(padded) for _ in parts]
        swap = self.ranks.begin_spread(padded, taken)

        def end() -> None:
            swap.wait()
            for part, other in zip(parts, taken, strict=True):
                part.copy_(other[: part.numel()])

        return end
