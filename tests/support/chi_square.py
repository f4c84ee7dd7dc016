"""Whether counts are even: how far a chi-square statistic is from its mean, in its deviations."""

from __future__ import annotations

import math

import numpy as np


def chi_square(counts: np.ndarray) -> float:
    """Standardised: about normal with mean 0 and deviation 1 for even counts."""
    expected = counts.sum() / counts.size
    free = counts.size - 1
    return float((((counts - expected) ** 2).sum() / expected - free) / math.sqrt(2 * free))
