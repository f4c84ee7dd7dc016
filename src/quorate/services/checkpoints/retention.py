"""Which checkpoints stay. Pure.

As TF1's Saver did: the newest few, and one every so many hours for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import NamedTuple


class Saved(NamedTuple):
    """A checkpoint that is on the disk."""

    global_step: int
    at: float  # seconds since the epoch, when it was written


def surplus(
    saved: Iterable[Saved],
    newest: int,
    *,
    keep: int,
    every_s: float | None,
    best: int | None,
) -> set[int]:
    """Return the steps whose checkpoints are to be deleted.

    Args:
        saved: all of them.
        newest: the step of the one that was just written. Those of later steps were passed over as
            damaged: the run will come by and replace them.
        keep: how many of the newest stay.
        every_s: seconds; the first one stays for ever, and each that was written so long after the
            last that does. None: none does.
        best: the step of the best one, which stays until another is better; None: there is none.
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
