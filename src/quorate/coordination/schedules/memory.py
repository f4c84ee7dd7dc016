"""Memory of a schedule: of how many shards activations are held at a time.

They are held from a shard's forward until its backward, or until the second part of it: parameters'
gradients are made of what the forward left.
"""

from __future__ import annotations

from quorate.coordination.schedules.action import Row, Rows, Work
from quorate.coordination.schedules.dependencies import SECOND_HALF, stages_of


def in_flight(rows: Rows) -> tuple[int, ...]:
    """Return the most shards whose activations a stage holds at a time, of each stage, (S,)."""
    return tuple(
        max(_most(tuple(action for action in row if action.stage == stage)) for row in rows)
        for stage in range(stages_of(rows))
    )


def in_flight_by_device(rows: Rows) -> tuple[int, ...]:
    """Return the most that a device holds at a time, over all of its stages, (p,)."""
    return tuple(_most(row) for row in rows)


def _most(row: Row) -> int:
    held = most = 0
    for action in row:
        held += (action.work is Work.FORWARD) - (action.work in SECOND_HALF)
        most = max(most, held)
    return most
