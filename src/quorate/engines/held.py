"""A gradient that lies elsewhere: servers hold its slices, and the coordinator knows of it.

It stands where a gradient stands in a shard's sum, so that sums are decided on as ever. Servers add
what they are told to keep, along the tree of shards, as anybody would.
"""

from __future__ import annotations

import torch

from quorate.replica.flat import Flat, Layout


class Held(Flat):
    """The gradient of a shard, or of some, of one step.

    Args:
        step: that they are of.
        ticket: that servers know the shard's by.
    """

    def __init__(self, step: int, ticket: int) -> None:
        super().__init__(Layout(()), [])
        self.step, self.ticket = step, ticket
        self.shards = 1
        self.factor = 1.0  # that the mean is to be multiplied by

    def on(self, device: torch.device) -> Held:  # noqa: ARG002
        """Return self: it is on no device of this process."""
        return self

    def add_(self, other: Flat) -> Held:
        """Note that others belong to the sum too: servers have added them."""
        assert isinstance(other, Held)
        self.shards += other.shards
        return self

    def div_(self, divisor: float) -> None:
        """Do nothing: servers divide by the weight of a whole sum, see ``Serving.add``."""

    def mul_(self, factor: float) -> None:
        """Note a factor: servers multiply as they step."""
        self.factor *= factor
