"""An alarm: ends the wait of a selector, from any thread or signal handler."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from selectors import EVENT_READ, BaseSelector


class Alarm:
    """A pipe that a selector looks at. ``close`` it.

    Args:
        selector: its keys' data are called when they are ready.
        then: called when it was rung, by whoever waited.
    """

    def __init__(self, selector: BaseSelector, then: Callable[[], None] | None = None) -> None:
        self._selector = selector
        self._then = then
        # Held while a descriptor is used: closed meanwhile, its number may be another file's. A
        # handler of signals may ring in the middle of a call of the same thread.
        self._lock = threading.RLock()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        selector.register(self._read, EVENT_READ, self._heard)

    def ring(self) -> None:
        """End the wait under way, or the next one. Any thread, also a signal handler, may."""
        with self._lock:
            if self._write >= 0:
                with suppress(BlockingIOError):  # it rings already
                    os.write(self._write, b"!")

    def close(self) -> None:
        """Close the pipe; more than once is no mistake."""
        with self._lock:
            if self._write >= 0:
                write, self._write = self._write, -1
                with suppress(KeyError, RuntimeError, ValueError):  # the selector is closed
                    self._selector.unregister(self._read)
                os.close(self._read)
                os.close(write)

    def _heard(self) -> None:
        with self._lock:
            if self._write < 0:
                return  # closed by what else was ready in the same round
            with suppress(BlockingIOError):
                os.read(self._read, 4096)
        if self._then is not None:
            self._then()
