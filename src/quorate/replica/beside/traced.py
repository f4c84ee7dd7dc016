"""The position of a shard in compiled code: numbers that are not constants of a graph.

A graph is compiled for all steps. torch compiles an int into the graph, unless it is a
``DynamicInt``; and 0 and 1 even then, so 2 is added to all numbers. Decisions in Python that depend
on the numbers (a branch, the length of a loop) have a graph per outcome. The graph of a step
follows from the step's number, and not from the graphs compiled before.
"""

from __future__ import annotations

from typing import Any

import torch

from quorate.replica.beside.at import At

_ADDED = 2


class TracedAt:
    """``At`` in compiled code.

    Args:
        step: see ``At``; 2 is added to ``step``, ``epoch`` and ``last_step``.
        last_step: of the run; see ``Course``.
        has_last: whether ``last_step`` is known.
        rows: (b,) int64.
    """

    def __init__(
        self,
        step: int,
        epoch: int,
        last_step: int,
        rows: torch.Tensor,
        has_last: bool,
        training: bool,
    ) -> None:
        self.step = step - _ADDED
        self.epoch = epoch - _ADDED
        self.training = training
        self._last_step = last_step - _ADDED
        self._has_last = has_last
        self._rows = rows

    @property
    def progress(self) -> float:
        """See ``At``."""
        return min(1.0, self.step / self._last_step) if self._has_last else 0.0

    @property
    def rows(self) -> Any:
        """See ``At``: a NumPy array, as traced by torch."""
        return self._rows.numpy()


def handed_over(at: At, later: int = 0) -> tuple[Any, ...]:
    """Return the arguments of ``TracedAt`` for compiled code.

    Args:
        later: number of steps added to the position.
    """
    from torch.fx.experimental.sym_node import DynamicInt  # a slow import, rarely needed

    numbers = (at.step + later, at.epoch, at.last_step)
    dynamic = (DynamicInt(number + _ADDED) for number in numbers)
    return (*dynamic, torch.tensor(at.rows), at.last_step > 0, at.training)
