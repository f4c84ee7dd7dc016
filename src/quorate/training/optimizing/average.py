"""The average of parameters over updates."""

from __future__ import annotations

import copy
from collections.abc import Collection

from quorate.replica.flat import Flat


class Average:
    """Exponential moving average of the parameters.

    shadow -= (1 - d) * (shadow - value), with d = min(decay, (1 + n) / (10 + n)) after n updates:
    the ramp of tf.train.ExponentialMovingAverage. Without the ramp the initial values dominate for
    long.
    """

    def __init__(self, decay: float, parameters: Flat) -> None:
        self.decay = decay
        self._parameters = parameters
        self.shadow = parameters.new()
        self.shadow.copy_(parameters)
        self._pairs = [*zip(self.shadow.vectors, parameters.vectors, strict=True)]

    def of(self, names: Collection[str], decay: float) -> Average:
        """Return an average of some parameters, with a decay of its own, over the same shadow."""
        part = copy.copy(self)
        part.decay = decay
        runs = self.shadow.runs(names), self._parameters.runs(names)
        part._pairs = [(mine, theirs) for (mine, _), (theirs, _) in zip(*runs, strict=True)]
        return part

    def update(self, n: int) -> None:
        """Add the parameters after update n (from 1) to the average."""
        d = min(self.decay, (1 + n) / (10 + n))
        for mine, theirs in self._pairs:
            mine.lerp_(theirs, 1 - d)
