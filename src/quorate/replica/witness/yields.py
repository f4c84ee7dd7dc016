"""The results of a shard in two memory formats, to find models that depend on the format.

A model that assumes the strides of a tensor (``as_strided``, a view) reads other elements of a
tensor in another format.
"""

from __future__ import annotations

from typing import NamedTuple

from quorate.replica.flat import Flat
from quorate.replica.replica import Replica
from quorate.replica.witness.again import ShardArgs


class ShardYield(NamedTuple):
    """The results of a shard, as far as they do not depend on draws."""

    loss: float | None
    gradient: Flat | None

    def agrees(self, other: ShardYield) -> bool:
        """Return whether two results are equal up to rounding, which many layers may amplify."""
        one, two = self.loss, other.loss
        if one is not None and two is not None and abs(one - two) > 0.02 * max(abs(one), abs(two)):
            return False
        if self.gradient is None or other.gradient is None:
            return True
        distance = norm = 0.0
        for name, view in self.gradient.views.items():
            distance += float((view - other.gradient.views[name]).abs().square().sum())
            norm += float(view.abs().square().sum())
        return not distance > 0.1 * norm


def yield_of(replica: Replica, shard: ShardArgs, *, training: bool) -> ShardYield:
    """Compute a shard, and return its results."""
    if training:
        made = replica.gradient(*shard)
        if not shard.stream.drawn and made.weight > 0:
            return ShardYield(made.means()["loss"], made.gradient)
        # Where a tensor is drawn, the order of its elements depends on its format.
        try:
            made = replica.evaluation(*shard)
        except Exception:  # a loss function for training only
            return ShardYield(None, None)
    else:
        made = replica.evaluation(*shard)
    drawn = shard.stream.drawn or made.weight == 0
    return ShardYield(None if drawn else made.means()["loss"], None)
