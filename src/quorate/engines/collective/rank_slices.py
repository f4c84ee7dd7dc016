"""Rank slices: the parts of each vector that a rank sums, updates and keeps optimizer state of."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from quorate.coordination.ownership import BLOCK, blocks_of_bucket, buckets, slices
from quorate.engines.collective.rank_control import RankControl
from quorate.engines.partition import Partition
from quorate.replica.flat import Flat, Layout


class Bucket(NamedTuple):
    """A range of a vector that is exchanged at once, with the part of each rank."""

    vector: int
    span: range
    of: list[range]  # by rank

    def part(self, whole: Flat, rank: int) -> torch.Tensor:
        """Return a view of a rank's part of this bucket.

        Args:
            whole: vectors of the layout.
            rank: the owner of the part.
        """
        return whole.vectors[self.vector][self.of[rank].start : self.of[rank].stop]


class RankSlices:
    """The slices of all ranks, of vectors of one layout.

    A rank's slice of a vector is the concatenation of the rank's parts of all buckets.

    Args:
        ranks: the connections to all ranks.
        layout: of the whole vectors.
        bucket_bytes: the size of a bucket, at most.
    """

    def __init__(self, ranks: RankControl, layout: Layout, bucket_bytes: int) -> None:
        self.ranks = ranks
        self.whole = layout
        self.buckets: list[Bucket] = []
        for vector, (size, dtype) in enumerate(zip(layout.sizes, layout.dtypes, strict=True)):
            blocks = bucket_bytes // (BLOCK * dtype.itemsize)
            if ranks.device.type == "cpu" and len(ranks.hosts.ranks) > 1:
                blocks = blocks_of_bucket(size, ranks.size, blocks)
            spans = buckets(size, blocks)
            self.buckets += [
                Bucket(vector, span, slices(span, ranks.size, turn))
                for turn, span in enumerate(spans)
            ]
        self.partition = Partition(
            layout, [[(b.vector, b.of[rank]) for b in self.buckets] for rank in range(ranks.size)]
        )
        self._own = self.partition.ranges[ranks.rank]
        self.layout = Layout(
            (str(n), torch.empty(sum(len(span) for v, span in self._own if v == n), dtype=dtype))
            for n, dtype in enumerate(layout.dtypes)
        )
        self.part = lru_cache(maxsize=1)(self._part)

    def pieces(self, own: Flat) -> list[torch.Tensor]:
        """Return the views of this rank's parts of its slices, in the order of buckets."""
        return [
            piece
            for number, vector in enumerate(own.vectors)
            for piece in torch.split(vector, [len(span) for v, span in self._own if v == number])
        ]

    def _part(self, own: Flat) -> Flat:
        """Return this rank's slices with a view for each piece of a parameter; see ``Partition``.

        The last result is kept: the slices of all gradients lie in the same memory.
        """
        return Flat(self.partition.layout(self.ranks.rank), self.pieces(own))

    def put(self, own: Flat, whole: Flat) -> None:
        """Copy this rank's slices to their places in whole vectors."""
        places = self.partition.views(whole, self.ranks.rank)
        for piece, place in zip(self.pieces(own), places, strict=True):
            place.copy_(piece)
