"""The progress of a start: messages about slow phases before a run's first update."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

AFTER_S = 5.0  # seconds without output before the current phase is named
EVERY_S = 30.0  # between two lines about the same phase


class StartProgress:
    """The messages about a slow start, while nothing else is shown. Call ``close``.

    A separate thread writes the lines, because user code may block the calling thread. The thread
    starts with the first phase, and ends with ``close``.

    Args:
        mention: shows a line to the user; called in the separate thread.
        after_s: seconds without output before the current phase is named; default: ``AFTER_S``.
        every_s: seconds until the same phase is named again.
    """

    def __init__(
        self,
        mention: Callable[[str], None],
        after_s: float | None = None,
        every_s: float = EVERY_S,
    ) -> None:
        self._mention = mention
        self._after_s = AFTER_S if after_s is None else after_s
        self._every_s = every_s
        self._changed = threading.Condition()
        self._what: Callable[[], str] | None = None  # None: no phase is in progress
        self._shown_at = time.monotonic()  # time of the last line; at first: of the start
        self._begun_at = self._due_at = 0.0
        self._is_named = False  # whether the current phase has been named
        self._is_over = False
        self._thread: threading.Thread | None = None

    def at(self, what: str | Callable[[], str]) -> None:
        """Begin a phase, which ends the previous phase.

        Args:
            what: the name of the phase, "loading rows", or a function that returns the current
                name. Any thread may call the function.
        """
        with self._changed:
            self._what = (lambda: what) if isinstance(what, str) else what
            self._begun_at, self._is_named = time.monotonic(), False
            self._due_at = self._shown_at + self._after_s
            self._changed.notify()
        if self._thread is None and not self._is_over:
            thread = threading.Thread(target=self._run, name="quorate-start", daemon=True)
            with suppress(RuntimeError):  # no thread can be started: the start is silent
                thread.start()
                self._thread = thread

    def close(self) -> None:
        """End the messages: from now on other output shows the progress. May be called again."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (due := self._due()) is not None:
            what, took_s = due
            self._mention(
                f"{what()} ..." if took_s is None else f"{what()} ({took_s:.0f} s so far)"
            )

    def _due(self) -> tuple[Callable[[], str], float | None] | None:
        """Wait until a phase has to be named.

        Returns:
            The phase; and its duration so far in seconds, if the phase was named before. None after
            ``close``.
        """
        with self._changed:
            while not self._is_over:
                left_s = self._due_at - time.monotonic()
                if left_s > 0 or self._what is None:
                    self._changed.wait(max(left_s, 0.0))
                    continue
                now = self._shown_at = time.monotonic()
                took_s = now - self._begun_at if self._is_named else None
                self._due_at, self._is_named = now + self._every_s, True
                return self._what, took_s
        return None
