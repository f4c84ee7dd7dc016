"""Where in its run a shard is: what the loss function and whatever loads rows may ask for.

All of it is a pure function of the plan, the step and the shard, and none of a clock: so a shard
that is computed again, elsewhere or after a resume, is told the same.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quorate.coordination.course import Course
from quorate.coordination.plan import Plan
from quorate.errors import UserError


@dataclass(frozen=True, slots=True, eq=False)
class At:
    """Where in its run a shard is. Nothing of it can be set.

    Args:
        step: updates before the one that the shard is for, from 0. Under "async" and "bounded:K"
            an update is a shard, and this is the number of the shard in the order of the rows.
        epoch: passes over the training rows before this one, from 0.
        training: whether a gradient is wanted. In an evaluation ``step``, ``epoch`` and
            ``progress`` are those of the update that would come next.
        rows: (b,) int64, the shard's rows by their numbers in the dataset; read-only.
    """

    step: int
    epoch: int
    training: bool
    rows: NDArray[np.int64] = field(repr=False)
    _course: Course = field(default_factory=Course, repr=False)

    @property
    def progress(self) -> float:
        """How much of the run is done, from 0 to 1: ``step`` by the updates that were asked for.

        Those are ``steps``, or ``epochs`` times the updates of one; a limit of time does not count,
        as bits would depend on it. 0 as long as nobody has trained.
        """
        return self._course.progress(self.step)

    @property
    def last_step(self) -> int:
        """Updates that the run has in the end; 0 as long as nobody has said."""
        return self._course.last_step


def at_of(plan: Plan, step: int, rows: NDArray[np.int64]) -> At:
    """Return where some rows of a step of a plan are.

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


class _Loading(threading.local):
    at: At | None = None


_loading = _Loading()


@contextmanager
def loading(at: At) -> Iterator[None]:
    """Within the block this thread loads rows, and ``at()`` says where they are."""
    before, _loading.at = _loading.at, at
    try:
        yield
    finally:
        _loading.at = before


def is_loading() -> bool:
    """Return whether this thread loads rows."""
    return _loading.at is not None


def at() -> At:
    """Return where in the run the rows are that this thread loads.

    For a dataset, its collate and its augment, in whichever thread or process they are called: a
    curriculum, say. It is right for each row: those of the next epoch may be loaded while some of
    this one still are, which is why a dataset is asked nothing by ``set_epoch``.

    Raises:
        UserError: this thread loads none.
    """
    if _loading.at is None:
        raise UserError(
            "quorate.data.at()",
            got="a call outside of a dataset's __getitem__, collate or augment",
            expected="a call inside one of these",
            fix="in a loss function use the third argument, which has the same value",
        )
    return _loading.at
