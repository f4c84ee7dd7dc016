"""The results of a shard, and sums of these results.

Every average is a weighted sum over a total weight: sum(w_s * x_s) / sum(w_s), never a mean of
means. The division happens once, after the last addition. Totals are sums of integers.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import torch

from quorate.coordination.tree import Node
from quorate.errors import LossError
from quorate.replica.flat import Flat
from quorate.replica.loss_terms import Denominators
from quorate.replica.outputs.rows import Piece
from quorate.replica.totals import Counts, add
from quorate.replica.whole_batch.represented import Representations
from quorate.replica.witness import writes


class ShardShare(NamedTuple):
    """A shard's contribution and worker: for people, not for sums."""

    shard: int
    worker: int
    loss: float  # weighted
    weight: float


class ShardSum(msgspec.Struct, omit_defaults=True):
    """The weighted sums over one shard, or over the shards of a subtree."""

    weight: float
    metrics: dict[str, float]  # weighted sums, "loss" first; as float64
    gradient: Flat | None = None  # weighted sums; none in an evaluation
    buffers: torch.Tensor | None = None  # sums of ``Buffers.change``, float64
    integer_buffers: torch.Tensor | None = None  # (other buffers,) bytes of the leftmost shard
    missing: frozenset[str] | None = None  # parameters without gradient in any shard of weight > 0
    shares: list[ShardShare] = []  # of all shards in the sum
    totals: Counts = {}
    written: Flat | None = None  # parameters written by forward, see ``writes``
    # Of each shard, in order, for a loss over the whole batch.
    represented: list[Representations] = []
    outputs: list[Piece] = []  # by row, of all shards in the sum
    # Of terms and metrics with weights of their own; None: ``weight`` divides all sums.
    denominators: Denominators | None = None

    @property
    def divisor(self) -> float:
        """The denominator of the gradient."""
        return self.weight if self.denominators is None else self.denominators.divisor

    @property
    def has_writes(self) -> bool:
        """True if forward passes have written buffers or parameters."""
        are_none = self.buffers is None and self.integer_buffers is None and self.written is None
        return not are_none

    @property
    def awaits_totals(self) -> bool:
        """True if the gradient of a loss with terms follows from a second pass only."""
        return self.denominators is not None and self.denominators.awaits_totals

    def copied_denominators(self) -> Denominators:
        """Return a copy of the denominators; without any, the weight is the divisor."""
        found = self.denominators
        if found is None:
            return Denominators({}, divisor=self.weight)
        terms = {loss: [*names] for loss, names in found.terms.items()}
        return Denominators({**found.weights}, terms, found.divisor, found.is_final)

    def copied(self) -> ShardSum:
        """Return a sum with vectors in memory of its own."""

        def clone(vector: torch.Tensor | None) -> torch.Tensor | None:
            return None if vector is None else vector.clone()

        return msgspec.structs.replace(
            self,
            gradient=None if self.gradient is None else self.gradient.copied(),
            buffers=clone(self.buffers),
            integer_buffers=clone(self.integer_buffers),
            written=None if self.written is None else self.written.copied(),
        )

    def means(self) -> dict[str, float]:
        """Return the weighted means of all metrics."""
        if self.denominators is not None:
            return self.denominators.means(self.metrics, self.weight)
        return {name: value / self.weight for name, value in self.metrics.items()}

    def computed_by(self, worker: int, shard: int) -> ShardSum:
        """Note the worker of a shard in this sum, and return the sum."""
        self.shares = [ShardShare(shard, worker, self.metrics["loss"], self.weight)]
        return self

    def add(self, right: ShardSum) -> ShardSum:
        """Return self + right, in place: ``self`` must hold the shards to the left."""
        self.join(right)
        if self.gradient is not None and right.gradient is not None:
            self.gradient.add_(right.gradient)
        return self

    def join(self, right: ShardSum) -> ShardSum:
        """Add all of ``right`` except the gradient; the caller adds the gradients."""
        if self.denominators is not None or right.denominators is not None:
            self._join_denominators(right)
        if self.metrics.keys() != right.metrics.keys():
            raise LossError(
                "metrics",
                got=f"{sorted(self.metrics)} from one shard and {sorted(right.metrics)} from "
                "another",
                expected="the same names from every shard",
                fix="return each metric for every shard",
            )
        if self.totals or right.totals:
            add(self.totals, right.totals)
        self.shares += right.shares
        self.represented += right.represented
        self.outputs += right.outputs
        self.weight += right.weight
        for name, value in right.metrics.items():
            self.metrics[name] += value
        if self.buffers is not None and right.buffers is not None:
            self.buffers.add_(right.buffers.to(self.buffers.device))
        if self.written is not None and right.written is not None:
            writes.add(self.written, right.written)
        if self.missing is None or right.missing is None:
            self.missing = right.missing if self.missing is None else self.missing
        else:
            self.missing &= right.missing
        return self

    def _join_denominators(self, right: ShardSum) -> None:
        """Add denominators; names with denominators of their own may be missing in some shards."""
        sums, added = self.copied_denominators(), right.copied_denominators()
        for name in self.metrics.keys() & right.metrics.keys():
            if (name in sums.weights) != (name in added.weights):
                raise LossError(
                    f"metric {name!r}",
                    got="a weight from one shard, and no weight from another",
                    expected="the same from every shard",
                    fix='return {"loss": value, "weight": n} for every shard',
                )
        sums.add(added)
        self.denominators = sums
        for one, other in ((self, right), (right, self)):
            absent = other.metrics.keys() - one.metrics.keys()
            one.metrics |= {n: 0.0 for n in other.metrics if n in absent and n in sums.weights}


# The sum over the shards below one node of the tree: a worker's result for a step.
Part = tuple[Node, ShardSum]
