"""Progress of a start: what a run does before its first update, where that takes long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

AFTER_S = 5.0  # without a line, before one says what is being done
EVERY_S = 30.0  # between two lines about the same phase


class StartProgress:
    """Says what a run is doing while nothing else is shown; ``close`` it.

    A thread writes the lines, as user code may hold up the one that calls. It starts with the first
    phase, and ends with ``close``.

    Args:
        mention: shows a line to the user; called in the thread.
        after_s: how long nothing is shown before the phase is named that is under way then;
            default: ``AFTER_S``.
        every_s: how long until the same phase is named again.
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
        self._what: Callable[[], str] | None = None  # None: nothing is under way
        self._shown_at = time.monotonic()  # the last line; at first: the beginning
        self._begun_at = self._due_at = 0.0
        self._is_named = False  # the phase
        self._is_over = False
        self._thread: threading.Thread | None = None

    def at(self, what: str | Callable[[], str]) -> None:
        """Begin a phase, which ends the one before.

        Args:
            what: is done now: "loading rows", or what returns that when it is to be shown. Any
                thread may call it.
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
        """End: from here on other lines tell how the run goes. Again is no matter."""
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
        """Wait until a phase is to be named, and return it; None: it is over.

        Returns:
            The phase; and how long it takes so far, if it was named before.
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
