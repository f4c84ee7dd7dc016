"""The position of a shard in the run, for loss functions and for code that loads rows.

The position is a pure function of the plan, the step and the shard, without a clock. A shard that
is computed again, on another worker or after a resume, has the same position.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quorate.coordination.epochs import Course
from quorate.coordination.plan import Plan
from quorate.errors import UserError


@dataclass(frozen=True, slots=True, eq=False)
class At:
    """The position of a shard in the run, as the loss function receives it. Read-only.

    Args:
        step: number of updates before the update of the shard, from 0. Under "async" and
            "bounded:K", where each shard is an update, the number of the shard in the order of the
            rows.
        epoch: number of completed passes over the training rows, from 0.
        training: True in training, False in an evaluation. In an evaluation ``step``, ``epoch`` and
            ``progress`` belong to the next update.
        rows: (b,) int64, the indices of the shard's rows in the dataset; read-only.
    """

    step: int
    epoch: int
    training: bool
    rows: NDArray[np.int64] = field(repr=False)
    _course: Course = field(default_factory=Course, repr=False)

    @property
    def progress(self) -> float:
        """The completed share of the run, from 0 to 1: ``step`` divided by the number of updates.

        The number of updates is ``steps``, or ``epochs`` times the updates per epoch.
        ``max_time_s`` does not count, because the bits would depend on the clock. 0 before the
        first training.
        """
        return self._course.progress(self.step)

    @property
    def last_step(self) -> int:
        """Number of updates at the end of the run; 0 before the first training."""
        return self._course.last_step


def at_of(plan: Plan, step: int, rows: NDArray[np.int64]) -> At:
    """Return the position in the run of some rows of a step of a plan.

    Args:
        rows: (b,) int64.
    """
    rows = rows.view()
    rows.flags.writeable = False
    course = plan.course
    if course.stands_at is not None:
        return At(*course.stands_at, False, rows, course)
    return At(step, plan.epoch(step), True, rows, course)


NOWHERE = At(0, 0, True, np.empty(0, dtype=np.int64))


# --- where rows are loaded ------------------------------------------------------------------------


class _ThreadPosition(threading.local):
    at: At | None = None


_loading = _ThreadPosition()


@contextmanager
def loading(at: At) -> Iterator[None]:
    """Set the position of the rows that this thread loads inside the block, for ``at()``."""
    before, _loading.at = _loading.at, at
    try:
        yield
    finally:
        _loading.at = before


def is_loading() -> bool:
    """Return whether this thread loads rows."""
    return _loading.at is not None


def at() -> At:
    """Return the position in the run of the rows that this thread is loading.

    Call ``at()`` in a dataset, its collate or its augment, in any thread or process: for a
    curriculum, for example. Rows of two epochs may be loaded at the same time; ``at()`` is correct
    for each row. For the same reason, quorate does not call ``set_epoch`` of a dataset.

    Raises:
        UserError: this thread is not loading rows.
    """
    if _loading.at is None:
        raise UserError(
            "quorate.data.at()",
            got="a call outside of a dataset's __getitem__, collate or augment",
            expected="a call inside one of these",
            fix="in a loss function use the third argument, which has the same value",
        )
    return _loading.at
