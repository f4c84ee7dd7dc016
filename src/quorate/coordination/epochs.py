"""Epochs: how many steps a pass over the dataset takes. Pure, and without NumPy.

Legend: R rows of the dataset, B rows of a batch, V shards.
"""

from __future__ import annotations


def steps_per_epoch(rows: int, batch_size: int, shards: int, *, by_shard: bool) -> int:
    """Return how many steps an epoch has: its batches, or all of their shards.

    The last batch has the rows that are left, and one shard per row where it has fewer than V.

    Args:
        rows: R, at least 1.
        batch_size: B, at least V.
        shards: V, at least 1.
        by_shard: whether each shard is a step of its own.
    """
    batches = -(-rows // batch_size)
    if not by_shard:
        return batches
    return (batches - 1) * shards + min(shards, rows - (batches - 1) * batch_size)
