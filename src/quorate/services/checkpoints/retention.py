"""The choice of the checkpoints to keep. Pure.

The rule of TF1's Saver: keep the newest few, and one checkpoint per so many hours for good.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import NamedTuple


class Saved(NamedTuple):
    """A checkpoint on disk."""

    global_step: int
    at: float  # time of writing, in seconds since the epoch


def surplus(
    saved: Iterable[Saved],
    newest: int,
    *,
    keep: int,
    every_s: float | None,
    best: int | None,
) -> set[int]:
    """Return the steps whose checkpoints have to be deleted.

    Args:
        saved: all checkpoints.
        newest: the step of the checkpoint just written. Checkpoints of later steps were skipped as
            damaged: the run will reach those steps again and replace them.
        keep: number of newest checkpoints to keep.
        every_s: seconds; the first checkpoint is kept for good, and so is each checkpoint written
            at least so long after the last one kept for good. None: no checkpoint is kept for good.
        best: the step of the best checkpoint, kept until a better one exists; None: there is none.
    """
    past = sorted(checkpoint for checkpoint in saved if checkpoint.global_step <= newest)
    stay = {best, *(checkpoint.global_step for checkpoint in past[-keep:])}
    if every_s is not None:
        last_at = -inf
        for checkpoint in past:
            if checkpoint.at >= last_at + every_s:
                last_at = checkpoint.at
                stay.add(checkpoint.global_step)
    return {checkpoint.global_step for checkpoint in past} - stay
