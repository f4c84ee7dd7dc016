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
    """The steps whose checkpoints are to be deleted.

    Args:
        saved: all of them.
        newest: the step of the one that was just written. Those of later steps were passed over as
            damaged: the run will come by and replace them.
        keep: how many of the newest stay.
        every_s: seconds; the first one stays for ever, and each that was written so long after the
            last that does. None: none does.
        best: the step of the best one, which stays until another is better; None: there is none.
    """
    past = sorted(one for one in saved if one.global_step <= newest)
    stay = {best, *(one.global_step for one in past[-keep:])}
    if every_s is not None:
        kept_at = -inf
        for one in past:
            if one.at >= kept_at + every_s:
                kept_at = one.at
                stay.add(one.global_step)
    return {one.global_step for one in past} - stay
