"""Rank slices: the parts of each vector that a rank sums, updates and keeps optimizer state of."""

from __future__ import annotations

from typing import NamedTuple

import torch

from quorate.coordination.ownership import BLOCK, blocks_of_bucket, buckets, slices
from quorate.engines.collective.rank_control import RankControl
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


class SlicePart(NamedTuple):
    """A range of a vector that lies in a rank's slice."""

    start: int  # in the vector
    length: int
    at: int  # in the rank's slice of that vector


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
        # By vector, then by rank.
        self.of = [
            [
                [bucket.of[rank] for bucket in self.buckets if bucket.vector == vector]
                for rank in range(ranks.size)
            ]
            for vector in range(len(layout.sizes))
        ]
        self.layout = Layout(
            (str(vector), torch.empty(sum(map(len, of[ranks.rank])), dtype=dtype))
            for vector, (of, dtype) in enumerate(zip(self.of, layout.dtypes, strict=True))
        )

    def stretches(self, whole: Flat, rank: int) -> list[torch.Tensor]:
        """Return the views of a rank's parts of whole vectors, in the order of buckets."""
        return [bucket.part(whole, rank) for bucket in self.buckets]

    def pieces(self, own: Flat) -> list[torch.Tensor]:
        """Return the views of this rank's parts of its slices, in the order of buckets."""
        return [
            piece
            for vector, of in zip(own.vectors, self.of, strict=True)
            for piece in torch.split(vector, [len(part) for part in of[self.ranks.rank]])
        ]

    def put(self, own: Flat, whole: Flat) -> None:
        """Copy this rank's slices to their places in whole vectors."""
        for piece, part in zip(
            self.pieces(own), self.stretches(whole, self.ranks.rank), strict=True
        ):
            part.copy_(piece)

    def within(self, span: range, vector: int, rank: int | None = None) -> list[SlicePart]:
        """Return the parts of a rank's slice that lie within a range of a vector.

        Args:
            span: the range.
            vector: the number of the vector.
            rank: the owner of the slice; None for this rank.
        """
        found, at = [], 0
        for part in self.of[vector][self.ranks.rank if rank is None else rank]:
            start, end = max(span.start, part.start), min(span.stop, part.stop)
            if start < end:
                found.append(SlicePart(start, end - start, at + start - part.start))
            at += len(part)
        return found
