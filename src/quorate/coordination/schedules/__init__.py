"""Schedules of a pipeline, as plain data: what each device computes, in which order.

A model is cut into S stages, numbered from 0 along the forward pass. The shards of a step are its
micro-batches: each goes forward through the stages, and backward through them. A schedule is one
row of actions per device, in the order in which the device computes them; an action begins as soon
as it is its turn and what it needs is there (``dependencies.py``). So a schedule says nothing of
time, and the bits that come out do not depend on it: it decides what is held, and who waits.

``schedule(stages, shards, devices=None)`` returns the rows; ``SCHEDULES`` has them by the names
that users write. Sends are buffered: no device waits until what it sent is received.
"""

from __future__ import annotations

from typing import Protocol

from quorate.coordination.schedules import (
    all_forward_all_backward,
    interleaved,
    one_forward_one_backward,
    zero_bubble,
)
from quorate.coordination.schedules.action import Action, Row, Rows, Work

__all__ = ["SCHEDULES", "Action", "Row", "Rows", "Schedule", "Work"]


class Schedule(Protocol):
    """A function that makes the rows of a schedule."""

    def __call__(self, stages: int, shards: int, *, devices: int | None = None) -> Rows:
        """Return a row of actions per device.

        Args:
            stages: S, into how many the model is cut.
            shards: m, how many go through them.
            devices: p, how many there are. None: as many as stages.

        Raises:
            SettingError: it cannot be made of so many.
        """


SCHEDULES: dict[str, Schedule] = {
    "1f1b": one_forward_one_backward.schedule,
    "gpipe": all_forward_all_backward.schedule,
    "interleaved": interleaved.schedule,
    "zero-bubble": zero_bubble.schedule,
}
