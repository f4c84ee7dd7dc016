"""The progress of a start: messages about slow phases before a run's first update."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

AFTER_S = 5.0  # seconds without output before the current phase is named
EVERY_S = 30.0  # between two lines about the same phase
LOOK_EVERY_S = 0.1


class StartProgress:
    """The messages about a slow start, while nothing else is shown. Call ``close``.

    A separate thread writes the lines, because user code may block the calling thread. The thread
    starts with the first phase, and ends with ``close``.

    Args:
        mention: shows a line to the user; called in the separate thread.
    """

    def __init__(self, mention: Callable[[str], None]) -> None:
        self._mention = mention
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._what: Callable[[], str] = str
        self._shown_at = time.monotonic()  # time of the last line; at first: of the start
        self._begun_at = self._due_at = 0.0
        self._is_named = False  # whether the current phase has been named
        self._thread: threading.Thread | None = None

    def at(self, what: str | Callable[[], str]) -> None:
        """Begin a phase, which ends the previous phase.

        Args:
            what: the name of the phase, "loading rows", or a function that returns the current
                name. Any thread may call the function.
        """
        with self._lock:
            self._what = (lambda: what) if isinstance(what, str) else what
            self._begun_at, self._is_named = time.monotonic(), False
            self._due_at = self._shown_at + AFTER_S
        if self._thread is None and not self._over.is_set():
            thread = threading.Thread(target=self._run, name="quorate-start", daemon=True)
            with suppress(RuntimeError):  # no thread can be started: the start is silent
                thread.start()
                self._thread = thread

    def close(self) -> None:
        """End the messages: from now on other output shows the progress. May be called again."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            with self._lock:
                now = time.monotonic()
                if now < self._due_at:
                    continue
                what = self._what
                took = f"({now - self._begun_at:.0f} s so far)" if self._is_named else "..."
                self._shown_at, self._due_at, self._is_named = now, now + EVERY_S, True
            self._mention(f"{what()} {took}")
