"""Visits of user code between two updates: to look for what it changed is a pass over memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Visits:
    """Whether user code has run since the last update.

    Who says nothing may run some at any time: a loop of one's own, say. ``fit`` knows its callbacks
    and evaluations, and says so before each.
    """

    def __init__(self) -> None:
        self._are_announced = False
        self._has_come = True
        self._before: Callable[[], None] = lambda: None

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Within the block ``announce`` is called before any user code runs between updates."""
        self._are_announced = True
        try:
            yield
        finally:
            self._are_announced = False

    def announce(self) -> None:
        """Note that user code is about to run."""
        if not self._has_come:
            self._has_come = True
            self._before()

    def updated(self, before: Callable[[], None]) -> None:
        """Note that an update was made.

        Args:
            before: called before the first user code that runs from now on: at once, if nobody
                announces it.
        """
        self._before, self._has_come = before, False
        if not self._are_announced:
            self.announce()

    @property
    def has_come(self) -> bool:
        """Whether some may have run since the last update, or since the loop began."""
        return self._has_come
