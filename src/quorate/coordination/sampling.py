"""Sampling: the rows of an epoch, drawn by weights. A pure function of seed and epoch.

Legend: R rows of the dataset, D rows of an epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quorate.coordination.keys import hashes, key
from quorate.errors import SettingError

Rows = NDArray[np.int64]

_LN2 = 0.6931471805599453  # rounded once, the same anywhere
_TERMS = 12  # of atanh, up to 0.172: what is left out is below 2e-19 of it


class EpochRows(Protocol):
    """The rows of an epoch: a pure function of seed and epoch."""

    @property
    def rows(self) -> int:
        """D, of every epoch."""

    @property
    def sha256(self) -> str:
        """A hash of all that ``drawn`` depends on."""

    @property
    def replacement(self) -> bool:
        """True if a row may be in an epoch twice."""

    def require_rows(self, rows: int) -> None:
        """Require a dataset of so many rows; raises SettingError."""

    def drawn(self, seed: int, epoch: int) -> Rows:
        """Return the rows of an epoch in the order that they are dealt in, (D,) int64."""


class Sampling:
    """Draw the rows of an epoch by weights, for data with rare rows or classes.

    Pass a ``Sampling`` to ``Loading(sampling=)``. A row that is drawn several times in an epoch is
    augmented with new random numbers each time. Drawing an epoch takes O(R + D log R) with
    replacement and O(R log R) without.

    Args:
        weights: (R,) numbers >= 0, one per row of the dataset. The sum need not be 1. A row of
            weight 0 is never drawn.
        rows: number of rows D in an epoch. Default: R; without replacement, the number of rows with
            a weight above 0.
        replacement: whether a row may be drawn more than once per epoch. Without replacement,
            weights decide which rows are in the epoch and which come early; set ``rows`` below R.
            Default: True.

    Raises:
        SettingError: a weight is negative or not a number, all weights are zero, or ``rows``
            without replacement exceeds the number of rows with a weight above 0.
    """

    def __init__(
        self, weights: ArrayLike, *, rows: int | None = None, replacement: bool = True
    ) -> None:
        self.weights = _checked(weights)  # (R,) float64
        drawable = int(np.count_nonzero(self.weights))
        self.rows: int = _whole(rows, len(self.weights) if replacement else drawable)
        self.replacement = bool(replacement)
        if not replacement and self.rows > drawable:
            expected = f"at most the {drawable:,} with a weight above 0"
            fix = "choose fewer, or replacement=True"
            raise SettingError("Sampling.rows", self.rows, expected, fix)
        content = hashlib.sha256(f"{self.rows} {self.replacement} ".encode())
        content.update(self.weights.astype("<f8").tobytes())
        self.sha256 = content.hexdigest()

    @classmethod
    def balanced(cls, labels: Sequence[Any] | NDArray[Any], *, rows: int | None = None) -> Sampling:
        """Return a sampling with replacement that draws every class equally often.

        Args:
            labels: (R,) numbers or strings, the class of each row.
            rows: number of rows D in an epoch. Default: R.

        Raises:
            SettingError: ``labels`` is empty, or is not a list of numbers or strings.
        """
        array = np.asarray(labels)
        if array.ndim != 1 or array.dtype.kind not in "biufUS":
            got = f"{array.dtype} of shape {array.shape}"
            fix = "pass a list of numbers or texts"
            raise SettingError("Sampling.balanced(labels=)", got, "a label for each row", fix)
        _, classes, counts = np.unique(array, return_inverse=True, return_counts=True)
        return cls(1.0 / counts[classes.reshape(-1)], rows=rows)

    def __repr__(self) -> str:
        how = "with" if self.replacement else "without"
        return f"Sampling({self.rows:,} of {len(self.weights):,} rows, {how} replacement)"

    def require_rows(self, rows: int) -> None:
        """Check that the dataset has one row per weight.

        Raises:
            SettingError: the numbers differ.
        """
        if rows != len(self.weights):
            expected = f"one for each of the {rows:,} rows of the dataset"
            fix = "pass as many weights, or labels, as there are rows"
            raise SettingError("sampling", f"{len(self.weights):,} weights", expected, fix)

    def drawn(self, seed: int, epoch: int) -> Rows:
        """Return the rows of an epoch in the order of the draws, (D,) int64."""
        start = key("sampling", seed, epoch)
        if self.replacement:
            # By the inverse of the cumulative weights. A draw is below the last of them, and a row
            # of weight 0 ends where the one before it does, so that it is never found.
            ends = np.cumsum(self.weights)  # one by one, in this order, on any machine
            at = _unit(hashes(start, np.arange(self.rows, dtype=np.uint64))) * ends[-1]
            found: Rows = np.searchsorted(ends, at, side="right").astype(np.int64, copy=False)
            return found
        # Each row waits for an exponential time of rate w, and the first D to come are in it:
        # Efraimidis & Spirakis, Information Processing Letters 97 (2006), in their logarithms.
        rows = np.flatnonzero(self.weights)
        unit = 1.0 - _unit(hashes(start, rows.astype(np.uint64)))  # in (0, 1]
        times = -_log(unit) / self.weights[rows]
        first: Rows = rows[np.argsort(times, kind="stable")[: self.rows]]
        return first.astype(np.int64, copy=False)


def sampling_of(name: str, value: object) -> EpochRows:
    """Check a setting: what has the methods of a ``Sampling``, or plain weights.

    Raises:
        SettingError: weights are wrong; see ``Sampling``.
    """
    if hasattr(value, "drawn") and hasattr(value, "sha256"):
        chosen: EpochRows = value  # type: ignore[assignment]
        return chosen
    if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
        expected = "quorate.Sampling(weights), Sampling.balanced(labels), or weights"
        raise SettingError(name, value, expected, "pass a weight for each row")
    return Sampling(value)  # type: ignore[arg-type]


def repeats(rows: Rows) -> Rows:
    """Return how often each of an epoch's rows was in it before, (D,) int64. O(D log D)."""
    by_row = np.argsort(rows, kind="stable")
    in_order = rows[by_row]
    is_first = np.ones(len(rows), dtype=bool)
    is_first[1:] = in_order[1:] != in_order[:-1]
    places = np.arange(len(rows), dtype=np.int64)
    times = np.empty(len(rows), dtype=np.int64)
    times[by_row] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    return times


def _checked(weights: ArrayLike) -> NDArray[np.float64]:
    expected, fix = "(R,) numbers >= 0, not all zero", "pass a weight for each row of the dataset"
    try:
        array = np.asarray(weights).astype(np.float64)  # a copy: the caller may change its own
    except (TypeError, ValueError) as error:
        got = type(weights).__name__
        raise SettingError("Sampling.weights", got, expected, fix) from error
    if array.ndim != 1 or not len(array):
        raise SettingError("Sampling.weights", f"shape {array.shape}", expected, fix)
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if len(wrong):
        got = f"{array[wrong[0]]} of row {wrong[0]:,}"
        raise SettingError("Sampling.weights", got, expected, "give it a weight from 0 on")
    with np.errstate(over="ignore"):
        total = float(np.cumsum(array)[-1])
    if not 0 < total < np.inf:
        raise SettingError("Sampling.weights", f"a sum of {total}", expected, fix)
    return array


def _whole(rows: int | None, default: int) -> int:
    if rows is None:
        return default
    if isinstance(rows, bool) or not isinstance(rows, (int, np.integer)) or rows < 1:
        fix = "pass how many rows an epoch has"
        raise SettingError("Sampling.rows", rows, "a whole number >= 1", fix)
    return int(rows)


def _unit(numbers: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return numbers in [0, 1), of 2**53 values."""
    return (numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _log(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return natural logarithms of positive numbers, with the same bits on any processor.

    NumPy's own have other last bits with other vector units, which may exchange two rows. Here is
    nothing but sums, products and quotients, each rounded as IEEE 754 says: log(m * 2**e) =
    e log 2 + 2 atanh((m - 1) / (m + 1)), with m from sqrt(1/2) to sqrt(2).
    """
    mantissa, exponent = np.frexp(values)
    is_low = mantissa < 0.7071067811865476
    mantissa = np.where(is_low, 2.0 * mantissa, mantissa)
    exponent = exponent - is_low
    z = (mantissa - 1.0) / (mantissa + 1.0)
    square = z * z
    series = np.zeros_like(z)
    for term in range(_TERMS, 0, -1):
        series = (series + 1.0 / (2 * term + 1)) * square
    logs: NDArray[np.float64] = exponent * _LN2 + 2.0 * z * (1.0 + series)
    return logs
