"""Adding on a node: results of its workers, along the tree of shards, like everywhere."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import NamedTuple

import torch

from quorate.coordination.tree import tree_sum
from quorate.engines.processes.arena import Arena, Image
from quorate.replica.shard_sum import ShardSum


class NodeAdder:
    """Adds results of shards: images of slots.

    Args:
        arena: of the layout of the slots.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._copies: list[torch.Tensor] = []  # kept for further sums: new pages take time

    def sum(self, images: Mapping[int, Image], shards: int) -> Image:
        """Return the image of the sum. The image is valid until the next call.

        Args:
            images: by shard, of all shards of one subtree, two at least. Nothing is written to
                these images.
            shards: V of the step.
        """
        # A left leaf of the tree is added to, and so is copied; a right leaf is only read.
        slots = {shard: _read_only(image) for shard, image in images.items()}
        left_leaves = [shard for shard in slots if shard % 2 == 0]
        while len(self._copies) < len(left_leaves):
            self._copies.append(torch.empty(self._arena.slot_bytes, dtype=torch.uint8))
        for shard, copy in zip(left_leaves, self._copies, strict=False):
            slots[shard] = copy.copy_(slots[shard])
        parts = [((0, shard), self._sums_in(slot)) for shard, slot in slots.items()]
        tree_sum(parts, shards, _add, present=len(parts))
        return slots[min(slots)].numpy()  # the leftmost leaf has the sum

    def _sums_in(self, slot: torch.Tensor) -> ShardSum:
        """Return the vectors of a shard's result; the remaining sums travel in messages."""
        values = self._arena.slot_in(_TensorMemory(slot))
        return ShardSum(
            weight=0.0,
            metrics={},
            gradient=values.flat,
            buffers=values.floats if values.floats.numel() else None,
            written=values.written,
        )


def _add(left: ShardSum, right: ShardSum) -> ShardSum:
    left.add(right)
    return left


def _read_only(image: Image) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of arrays that cannot be written to
        return torch.from_numpy(image)


class _TensorMemory(NamedTuple):
    """The bytes of a tensor, as memory for views."""

    memory: torch.Tensor

    def tensor(self, dtype: torch.dtype, count: int, start: int) -> torch.Tensor:
        return self.memory[start : start + count * dtype.itemsize].view(dtype)
