"""Turns on the random generators that a process shares: Python's and NumPy's.

Python's ``random`` and NumPy's legacy functions cannot be given to a thread, as torch's generator
can (``Stream``). ``Turns`` notices code that draws from them, so that such code, and only such
code, takes turns.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


class Turns:
    """Lets code that draws from the process's shared generators (Python's ``random``, NumPy's
    legacy functions) do so repeatably, whatever other threads do.

    One ``Turns`` watches one kind of code: a model, a dataset. Code that draws nothing is left
    alone. Once it is seen to draw, it is run again, and from then on always, with a seed of its own
    and while nobody else has a turn.

    Args:
        side_by_side: whether code that drew nothing in its first run goes on outside of turns. Its
            draws later on are then noticed unless other code is having a turn just then.
    """

    def __init__(self, *, side_by_side: bool = False) -> None:
        self.draws = False
        self._side_by_side = side_by_side
        self._first = True

    def run(self, work: Callable[[Callable[[int], None]], T]) -> T:
        """Run ``work(reseed)``, which must give the same result when it is run again.

        ``reseed`` takes a 64-bit key and does nothing as long as nothing is drawn. The states of
        the generators are afterwards what they were before.
        """
        if self._side_by_side and not self._first and not self.draws:
            turns = _turn.begun
            before = _shared_state()
            result = work(_leave_alone)
            if _same(_shared_state(), before) or _turn.active or _turn.begun != turns:
                return result
            self.draws = True
        with _turn.lock:
            before = _shared_state()
            if not self.draws:
                # A first run is a turn already: other code must not take its draws for its own.
                with _turn if self._first else nullcontext():
                    result = work(_leave_alone)
                    self._first = False
                    if _same(_shared_state(), before):
                        return result
                    self.draws = True
            with _turn:
                try:
                    return work(_reseed_shared)
                finally:
                    random.setstate(before[0])
                    np.random.set_state(before[1])


class _Turn:
    """The turn on the process's generators: there is one, as there is one of each of them."""

    def __init__(self) -> None:
        self._reset()
        # A fork may come while another thread has its turn, which then never ends in the child.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self.lock = threading.RLock()
        self.begun = 0  # turns that may draw, so far
        self.active = 0  # of these, not yet ended

    def __enter__(self) -> None:
        self.begun += 1
        self.active += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.active -= 1


_turn = _Turn()
_SharedState = tuple[Any, dict[str, Any]]


def _shared_state() -> _SharedState:
    return random.getstate(), np.random.get_state(legacy=False)


def _same(one: _SharedState, other: _SharedState) -> bool:
    numpy, numpy_other = one[1]["state"], other[1]["state"]
    return (
        one[0] == other[0]
        and bool(numpy["pos"] == numpy_other["pos"])
        and np.array_equal(numpy["key"], numpy_other["key"])
        and bool(one[1]["has_gauss"] == other[1]["has_gauss"])  # a second half of a pair
    )


def _leave_alone(_seed: int) -> None:
    pass


def _reseed_shared(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
