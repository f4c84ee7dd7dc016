"""Notes of replicas to the user: each is said once, whichever workers come upon it."""

from __future__ import annotations

import threading


class Notes:
    """Lines that wait to be said. Any thread may add one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._new: list[str] = []

    def add(self, line: str) -> None:
        """Note a line, unless it is known."""
        with self._lock:
            if line not in self._known:
                self._known.add(line)
                self._new.append(line)

    def take(self) -> list[str]:
        """Those that are new since the last call."""
        with self._lock:
            taken, self._new = self._new, []
            return taken
