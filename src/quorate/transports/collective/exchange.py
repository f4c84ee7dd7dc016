"""The exchange of a step: each rank gets its slice of what every other rank has summed.

Then each sums its slice along the tree, and so there is one order, whoever adds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quorate.coordination.ownership import slices
from quorate.coordination.tree import Node
from quorate.replica.flat import Flat, Layout
from quorate.replica.shard_sum import Part, ShardSum
from quorate.transports.collective.parts import Handed, from_bytes, to_bytes
from quorate.transports.collective.ranks import Ranks


class Slices:
    """The slices of vectors of one layout, over some ranks.

    Args:
        layout: of the whole vectors.
    """

    def __init__(self, ranks: Ranks, layout: Layout) -> None:
        self.ranks = ranks
        self.whole = layout
        self.of = [slices(size, ranks.size) for size in layout.sizes]  # by vector, then by rank
        self.layout = Layout(
            (str(vector), torch.empty(len(of[ranks.rank]), dtype=dtype))
            for vector, (of, dtype) in enumerate(zip(self.of, layout.dtypes, strict=True))
        )

    def stretches(self, vectors: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
        """Return the views of whole vectors that are a rank's slices."""
        return [
            vector[of[rank].start : of[rank].stop]
            for vector, of in zip(vectors, self.of, strict=True)
        ]

    def own(self, whole: Flat) -> Flat:
        """Return this rank's slices of whole vectors, as views of them."""
        return Flat(self.layout, self.stretches(whole.vectors, self.ranks.rank))

    def spread(self, whole: Flat) -> None:
        """Have all ranks get the slices that each has in its own whole vectors. Blocks."""
        ranks = self.ranks
        mine = self.stretches(whole.vectors, ranks.rank)
        others = [rank for rank in range(ranks.size) if rank != ranks.rank]
        ranks.swap(
            [(rank, part) for rank in others for part in mine],
            [(rank, part) for rank in others for part in self.stretches(whole.vectors, rank)],
        )


def exchanged(
    slices: Slices,
    own: Handed,
    gradient: Flat | None,
    written: Layout,
    stop: Callable[[str], None] = lambda _: None,
) -> list[Part]:
    """Return the sums of all ranks, each with this rank's slice of its gradient. Blocks.

    Args:
        own: what this rank hands over.
        gradient: of it: whole vectors, which may be added to in place afterwards.
        written: see ``from_bytes``.
        stop: told why a rank was asked to end.

    Raises:
        Whatever was raised on the lowest rank that raised, on all ranks.
    """
    ranks = slices.ranks
    handed = [from_bytes(packed, written) for packed in ranks.gather(to_bytes(own))]
    for rank, each in enumerate(handed):
        if each.stop is not None:
            stop(f"rank {rank}: {each.stop}")
    for each in handed:
        if each.error is not None:
            raise each.error
    # In the order of ranks on both ends: between two of them one sends what the other takes.
    sends, takes = [], []
    gradients: list[Flat | None] = []
    for rank, each in enumerate(handed):
        if rank == ranks.rank:
            gradients.append(None if gradient is None else slices.own(gradient))
            continue
        if gradient is not None:
            sends += [(rank, part) for part in slices.stretches(gradient.vectors, rank)]
        taken = None if each.sum is None else slices.layout.new(ranks.device)
        gradients.append(taken)
        if taken is not None:
            takes += [(rank, vector) for vector in taken.vectors]
    ranks.swap(sends, takes)
    parts: list[tuple[Node, ShardSum]] = []
    for each, vectors in zip(handed, gradients, strict=True):
        if each.sum is not None:
            assert each.node is not None
            each.sum.gradient = vectors
            parts.append((each.node, each.sum))
    return parts
