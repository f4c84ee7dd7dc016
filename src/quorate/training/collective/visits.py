"""Visits of user code between two updates: each visit costs a pass over memory for changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Visits:
    """A record of whether user code has run since the last update.

    Without announcements, user code may run at any time, as in a user's own loop over updates.
    ``fit`` knows its callbacks and evaluations, and announces each of them.
    """

    def __init__(self) -> None:
        self._are_announced = False
        self._has_come = True
        self._before: Callable[[], None] = lambda: None

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Promise, inside the block, to call ``announce`` before user code runs between updates."""
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
            before: called before the first user code after the update; at once, without
                announcements.
        """
        self._before, self._has_come = before, False
        if not self._are_announced:
            self.announce()

    @property
    def has_come(self) -> bool:
        """True if user code may have run since the last update, or since the loop began."""
        return self._has_come
