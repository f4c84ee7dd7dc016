"""The exchange of a step: each rank gets its slice of what every other rank has summed.

Then each sums its slice along the tree, and so there is one order, whoever adds.
"""

from __future__ import annotations

from collections.abc import Callable

from quorate.coordination.tree import Node
from quorate.replica.flat import Flat, Layout
from quorate.replica.shard_sum import Part, ShardSum
from quorate.transports.collective.parts import Handed, from_bytes, to_bytes
from quorate.transports.collective.slices import Slices


def exchanged(
    slices: Slices,
    own: Handed,
    gradient: Flat | None,
    written: Layout,
    hear: Callable[[int, Handed], None],
) -> list[Part]:
    """Return the sums of all ranks, each with this rank's slice of its gradient. Blocks.

    Args:
        own: what this rank hands over.
        gradient: of it: whole vectors, which may be added to in place afterwards.
        written: see ``from_bytes``.
        hear: told what each rank handed over, in the order of ranks.

    Raises:
        Whatever was raised on the lowest rank that raised, on all ranks.
    """
    ranks = slices.ranks
    handed = [from_bytes(packed, written) for packed in ranks.gather(to_bytes(own))]
    for rank, each in enumerate(handed):
        hear(rank, each)
    for each in handed:
        if each.error is not None:
            raise each.error
    # In the order of ranks on both ends: between two of them one sends what the other takes.
    sends, takes = [], []
    gradients: list[Flat | None] = []
    for rank, each in enumerate(handed):
        taken = None if each.sum is None else slices.layout.new(ranks.device)
        gradients.append(taken)
        if rank == ranks.rank:
            if taken is not None and gradient is not None:
                slices.take(taken, gradient)
            continue
        if gradient is not None:
            sends += [(rank, part) for part in slices.stretches(gradient, rank)]
        if taken is not None:
            takes += [(rank, piece) for piece in slices.pieces(taken)]
    ranks.swap(sends, takes)
    parts: list[tuple[Node, ShardSum]] = []
    for each, vectors in zip(handed, gradients, strict=True):
        if each.sum is not None:
            assert each.node is not None
            each.sum.gradient = vectors
            parts.append((each.node, each.sum))
    return parts
