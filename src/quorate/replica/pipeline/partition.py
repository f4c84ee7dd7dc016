"""Partitions: a sequence of work cut into runs such that the greatest run is least.

Pure: the linear partition problem, by dynamic programming (Skiena, The Algorithm Design Manual,
section 10.7), with a bound on a second quantity of each run.

Legend: N pieces, S runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

Fits = Callable[[int, int, int], bool]  # whether run s may consist of the pieces from i to before j


def _any(_run: int, _first: int, _end: int) -> bool:
    return True


def partition(
    costs: Sequence[float], runs: int, fits: Fits = _any
) -> tuple[tuple[int, ...], float] | None:
    """Return the beginnings of all runs but the first, such that the costliest run costs least.

    Among equal partitions, the last runs begin as early as possible; the choice is the same each
    time. O(S N^2).

    Args:
        costs: (N,) costs of the pieces, at least 0.
        runs: S; no run is empty.
        fits: tells which runs are allowed.

    Returns:
        The (S - 1,) beginnings, and the cost of the costliest run; None if there is no partition.
    """
    count = len(costs)
    if not 1 <= runs <= count:
        return None
    upto = [0.0, *accumulate(costs)]
    # least[j]: cost of the first j pieces in s runs; None: there is no such partition
    least: list[float | None] = [0.0, *[None] * count]
    begins: list[list[int]] = []
    for run in range(runs):
        now: list[float | None] = [None] * (count + 1)
        begin = [0] * (count + 1)
        for end in range(run + 1, count + 1):
            for first in range(run, end):
                before, best = least[first], now[end]
                if before is None or not fits(run, first, end):
                    continue
                worst = max(before, upto[end] - upto[first])
                if best is None or worst < best:
                    now[end], begin[end] = worst, first
        least = now
        begins.append(begin)
    if (found := least[count]) is None:
        return None
    cuts, end = [], count
    for begin in reversed(begins[1:]):
        end = begin[end]
        cuts.append(end)
    return tuple(reversed(cuts)), found
