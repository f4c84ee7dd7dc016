"""A gradient that lies elsewhere: servers hold its slices, and the coordinator knows which.

It stands where a gradient stands in a shard's sum, so that sums are decided on as ever: to add two
is to note that servers are to, and they add the shards along the tree of shards, as anybody would.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quorate.coordination.tree import Node
from quorate.replica.flat import Flat, Layout


class Held(Flat):
    """The gradients of some shards of one step, each under the ticket that servers know it by.

    Args:
        step: that they are of.
        leaves: V, of the step's tree.
        tickets: by the shards' nodes.
    """

    def __init__(self, step: int, leaves: int, tickets: Mapping[Node, int]) -> None:
        super().__init__(Layout(()), [])
        self.step, self.leaves = step, leaves
        self.tickets = dict(tickets)
        self.factor = 1.0  # that the mean is to be multiplied by

    def on(self, device: torch.device) -> Held:  # noqa: ARG002
        """Return self: it is on no device of this process."""
        return self

    def add_(self, other: Flat) -> Held:
        """Note that others belong to the sum too."""
        assert isinstance(other, Held)
        self.tickets |= other.tickets
        return self

    def div_(self, divisor: float) -> None:
        """Do nothing: servers divide by the weight as they add, see ``Serving.add``."""

    def mul_(self, factor: float) -> None:
        """Note a factor: servers multiply as they step."""
        self.factor *= factor
