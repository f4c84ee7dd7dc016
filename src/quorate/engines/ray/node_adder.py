"""Adding on a node: what its workers have computed, along the tree of shards, as anywhere."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch

from quorate.coordination.tree import tree_sum
from quorate.engines.processes.arena import Arena, Image
from quorate.machine.shared_memory import Segment
from quorate.replica.shard_sum import ShardSum
from quorate.replica.snapshots import Vectors


class NodeAdder:
    """Adds results of shards, which are images of slots.

    Args:
        arena: of their layout.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._spare: list[Segment] = []  # slots that are written to, kept: new pages take time

    def sum(self, images: Mapping[int, Image], shards: int) -> Image:
        """Return the image of the sum. It is valid until the next call.

        Args:
            images: by shard, which together make up one subtree. Nothing is written to them.
            shards: V of the step.
        """
        spare = list(self._spare)
        parts = []
        for number, image in images.items():
            # What others are added to is copied, what is added is not: a right leaf of the tree.
            segment = None if number % 2 else self._copy(image, spare)
            parts.append(((0, number), _Slot.of(self._arena, image, segment)))
        total = tree_sum(parts, shards, _Slot.add, present=len(parts))
        return total.image

    def _copy(self, image: Image, spare: list[Segment]) -> Segment:
        if spare:
            segment = spare.pop()
        else:
            segment = Segment(self._arena.slot_bytes)
            self._spare.append(segment)
        segment.array(segment.nbytes)[:] = image
        return segment


class _Slot:
    """A result, and the image that it lies in."""

    def __init__(self, image: Image, sums: ShardSum) -> None:
        self.image = image
        self._sums = sums

    @classmethod
    def of(cls, arena: Arena, image: Image, segment: Segment | None) -> _Slot:
        if segment is None:
            return cls(image, _sums(arena.slot_in(_Borrowed(image))))
        return cls(segment.array(segment.nbytes), _sums(arena.slot_in(segment)))

    def add(self, right: _Slot) -> _Slot:
        self._sums.add(right._sums)
        return self


def _sums(values: Vectors) -> ShardSum:
    """Return what of a shard's sums lies in a slot; the rest is in messages."""
    return ShardSum(
        weight=0.0,
        metrics={},
        gradient=values.flat,
        buffers=values.floats if values.floats.numel() else None,
        written=values.written,
    )


class _Borrowed:
    """Somebody else's bytes, which nobody writes to."""

    def __init__(self, image: Image) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of arrays that cannot be written to
            self._bytes = torch.from_numpy(image)

    def tensor(self, dtype: torch.dtype, count: int, start: int) -> torch.Tensor:
        return self._bytes[start : start + count * dtype.itemsize].view(dtype)
