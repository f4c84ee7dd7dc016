"""Where in its run a shard is, in compiled code: numbers that are no constants of a graph.

A graph is made for all steps. torch compiles an int in, unless it is a ``DynamicInt``; and 0 and 1
even then, so that all are handed over with two added. What Python decides by them (a branch, how
often a loop goes round) has a graph for each way it goes. Which one a step has follows from its
number, and not from which were compiled before.
"""

from __future__ import annotations

from typing import Any

import torch

from quorate.replica.beside.at import At

_ADDED = 2


class TracedAt:
    """What ``At`` is, in compiled code.

    Args:
        step: as there, with two added; so are ``epoch`` and ``last_step``.
        last_step: of the run; see ``Course``.
        has_last: whether anybody has said it.
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
        """As of ``At``."""
        return min(1.0, self.step / self._last_step) if self._has_last else 0.0

    @property
    def rows(self) -> Any:
        """As of ``At``: an array of NumPy's, as torch traces them."""
        return self._rows.numpy()


def handed_over(at: At, later: int = 0) -> tuple[Any, ...]:
    """Return what compiled code makes a ``TracedAt`` of.

    Args:
        later: so many steps later than it is.
    """
    from torch.fx.experimental.sym_node import DynamicInt  # takes its time, and few want it

    numbers = (at.step + later, at.epoch, at.last_step)
    dynamic = (DynamicInt(number + _ADDED) for number in numbers)
    return (*dynamic, torch.tensor(at.rows), at.last_step > 0, at.training)
