"""Detection of a loss summed over rows and not a mean, by the losses of parts of the rows.

Legend: L(P) the loss of the rows P, w(P) their weight, S all rows, S_1 .. S_k a partition of S.

A step's loss is sum_i w(S_i) L(S_i) / sum_i w(S_i) over its shards. The loss is independent of the
shards if this equals L(S), as for means over rows, tokens or pixels. Let T_k = sum_i L(S_i) be the
total over a partition in k parts. For a mean m(P) plus a sum s(P), L = m + s, T_k = k m + s is a
line in k, and the value of the line at k = 0 is the sum: s = 2 T_1 - T_2. Losses that compare rows
with each other (contrastive, ranking) have a value at k = 0 too, but T_k is no line: another
partition shows the difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

LEAST_SHARE = 0.05  # share of a sum in a loss from which the sum is named
LEAST_SHARE_OF_NOISY = 0.2  # the same, if the loss draws random numbers
MOST_IN_ONE = 0.9  # share of a total in one part from which a partition is inconclusive
# Standard error, relative to the loss, of the deviation of totals from a line; for a pure sum, of
# the deviation from the loss.
MOST_ERROR, MOST_ERROR_OF_PURE = 0.02, 0.05
ERRORS = 3.0  # standard errors within which two means count as equal
REPEATS = (2, 6, 8)  # computations of a loss that draws; a decision follows each number
PARTS = 4


class LossValue(NamedTuple):
    """The loss and weight returned by a loss function for some rows."""

    loss: float
    weight: float


class PartLosses(NamedTuple):
    """The losses of all rows and of the parts of three partitions, from one set of draws."""

    whole: LossValue
    halves: list[LossValue]
    interleaved: list[LossValue]  # halves made of every second row
    parts: list[LossValue]


class SummedLoss(NamedTuple):
    """A loss of which a share is a sum over the rows."""

    share: float
    whole: float
    halves: tuple[float, float]
    rows: int
    calls: str = ""  # the calls that make the sum, where known
    of: str = "the loss"  # or a term of the loss, in words


def compared_rows(rows: int, batch_rows: int) -> int:
    """Return the number of rows of a batch to compare: parts have to be of equal size.

    Args:
        rows: number of rows of the first shard.
        batch_rows: number of rows of the batch.
    """
    count = max(rows, min(PARTS, batch_rows))
    return count - count % PARTS if count >= PARTS else count


def partitions(rows: int) -> tuple[list[slice], list[slice], list[slice]]:
    """Return halves, interleaved halves, and up to ``PARTS`` parts of at least 2 rows."""
    parts = min(PARTS, rows)
    return (
        [slice(0, rows // 2), slice(rows // 2, rows)],
        [slice(0, rows, 2), slice(1, rows, 2)],
        [slice(n * rows // parts, (n + 1) * rows // parts) for n in range(parts)],
    )


def is_right(whole: LossValue, parts: Sequence[LossValue], tolerance: float) -> bool:
    """Return whether a weighted mean over parts is the loss of all rows, or not comparable."""
    values = [number for value in (whole, *parts) for number in value]
    weight = sum(part.weight for part in parts)
    if not all(map(math.isfinite, values)) or weight == 0 or whole.loss == 0:
        return True
    mean = sum(part.weight * part.loss for part in parts) / weight
    return abs(mean - whole.loss) <= tolerance * abs(whole.loss)


def share_of_sum(found: Sequence[PartLosses], tolerance: float) -> float | None:
    """Return the share of a loss that is a sum over rows; None if zero or not certain.

    Args:
        found: computations with different random numbers; a single one if the loss draws none.
        tolerance: relative difference of two losses that are equal except for rounding.
    """
    if any(_tells_nothing(totals) for totals in found):
        return None
    whole = _mean([totals.whole.loss for totals in found])
    if not math.isfinite(whole) or abs(whole) < 1e-7:
        return None
    shares, bends, differences = [], [], []
    pure: tuple[list[float], ...] = ([], [], [])
    for each in found:
        one, two, other = each.whole.loss, _total(each.halves), _total(each.interleaved)
        k, mean, parts = len(each.parts), two - one, _total(each.parts)
        shares.append((one - mean) / whole)
        bends.append((parts - (one - mean) - k * mean) / whole)
        differences.append((two - other) / whole)
        for offs, total in zip(pure, (two, other, parts), strict=True):
            offs.append((total - one) / whole)
    share = _mean(shares)
    if _are_zero(pure, MOST_ERROR_OF_PURE, tolerance):
        return 1.0
    # With fewer than ``PARTS`` rows, a line cannot be recognised.
    least = LEAST_SHARE if len(found) == 1 else LEAST_SHARE_OF_NOISY
    if len(found[0].parts) < PARTS or share < least + 4 * _error(shares):
        return None
    return share if _are_zero((bends, differences), MOST_ERROR, tolerance * PARTS) else None


def _are_zero(series: Sequence[Sequence[float]], most_error: float, tolerance: float) -> bool:
    """Return whether the mean of each series is zero within the certainty of its error."""
    for offs in series:
        error = _error(offs)
        if error > most_error or abs(_mean(offs)) > max(tolerance, ERRORS * error):
            return False
    return True


def may_be_sum(found: Sequence[PartLosses]) -> bool:
    """Return whether more computations of a loss that draws may show a sum."""
    shares = []
    for each in found:
        if _tells_nothing(each) or each.whole.loss == 0:
            return False
        shares.append((2 * each.whole.loss - _total(each.halves)) / each.whole.loss)
    return _mean(shares) + 2 * _error(shares) > LEAST_SHARE_OF_NOISY


def measured(
    compute: Callable[[int], PartLosses], *, draws: bool, tolerance: float
) -> tuple[float, PartLosses] | None:
    """Return the share of a loss that is a sum, with one computation; None if there is no sum.

    Args:
        compute: computes the losses, with the random numbers of a given number.
        draws: whether the loss draws random numbers.
        tolerance: see ``share_of_sum``.
    """
    found = [] if draws else [compute(0)]
    for count in REPEATS if draws else (0,):
        found += [compute(len(found) + n) for n in range(count)]
        share = share_of_sum(found, tolerance)
        if share is not None:
            return share, found[0]
        if not draws or not may_be_sum(found):
            return None
    return None


def _tells_nothing(totals: PartLosses) -> bool:
    whole, *partitions_ = totals
    values = [whole, *(value for part in partitions_ for value in part)]
    if not all(math.isfinite(value.loss) for value in values):
        return True
    for part in partitions_:
        sizes = [abs(value.loss) for value in part]
        if max(sizes) > MOST_IN_ONE * sum(sizes):
            return True
    return False


def _total(values: Sequence[LossValue]) -> float:
    return sum(value.loss for value in values)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; 0 for a single value."""
    n, mean = len(values), _mean(values)
    if n == 1:
        return 0.0
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)
