"""Epochs: how many steps a pass over the dataset takes. Pure, and without NumPy.

Legend: D rows that an epoch has, B rows of a batch, V shards.
"""

from __future__ import annotations

SHORT, DROP, JOIN = "short", "drop", "join"
LAST = (SHORT, DROP, JOIN)  # what becomes of the rows of an epoch that fill no batch


def batches_per_epoch(rows: int, batch_size: int, last: str = SHORT) -> int:
    """Return how many batches an epoch has.

    Args:
        rows: D, at least B.
        batch_size: B, at least 1.
        last: "short": the rows that are left are a batch of their own; "drop": they are in none;
            "join": they are in the batch before.
    """
    return -(-rows // batch_size) if last == SHORT else rows // batch_size


def batch_bounds(batch: int, rows: int, batch_size: int, last: str = SHORT) -> tuple[int, int]:
    """Return where the rows of an epoch's batch begin and end in its order; arguments as above."""
    start = batch * batch_size
    if last == JOIN and batch == rows // batch_size - 1:
        return start, rows
    return start, min(start + batch_size, rows)


def steps_per_epoch(
    rows: int, batch_size: int, shards: int, *, by_shard: bool, last: str = SHORT
) -> int:
    """Return how many steps an epoch has: its batches, or all of their shards.

    A batch of fewer rows than V has one shard per row.

    Args:
        rows: D, at least B.
        batch_size: B, at least V.
        shards: V, at least 1.
        by_shard: whether each shard is a step of its own.
        last: see ``batches_per_epoch``.
    """
    batches = batches_per_epoch(rows, batch_size, last)
    if not by_shard:
        return batches
    start, stop = batch_bounds(batches - 1, rows, batch_size, last)
    return (batches - 1) * shards + min(shards, stop - start)
