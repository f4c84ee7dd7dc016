"""Notes of replicas to the user: each is said once, whichever workers come upon it.

A note may have several lines. The first one says what it is about: with another one of the same
first line nothing more is said.
"""

from __future__ import annotations

import threading


class Notes:
    """Notes that wait to be said. Any thread may add one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._new: list[str] = []

    def add(self, line: str) -> None:
        """Add a note, unless one with the same first line was added before."""
        about = line.partition("\n")[0]
        with self._lock:
            if about not in self._known:
                self._known.add(about)
                self._new.append(line)

    def take(self) -> list[str]:
        """Return the notes that are new since the last call."""
        with self._lock:
            taken, self._new = self._new, []
            return taken
