"""An alarm: ends the wait of a selector, from any thread or signal handler."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from selectors import EVENT_READ, BaseSelector


class Alarm:
    """A pipe watched by a selector. ``close`` the alarm after use.

    Args:
        selector: the owner of the selector calls the data of ready keys.
    """

    def __init__(self, selector: BaseSelector) -> None:
        self._selector = selector
        # Held while a descriptor is in use: after a close, the number may belong to another file. A
        # signal handler may ring in the middle of a call of the same thread.
        self._lock = threading.RLock()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        selector.register(self._read, EVENT_READ, self._heard)

    def ring(self) -> None:
        """End the wait under way, or the next wait. Safe from any thread and signal handler."""
        with self._lock:
            if self._write >= 0:
                with suppress(BlockingIOError):  # the pipe is full: the alarm rings already
                    os.write(self._write, b"!")

    def close(self) -> None:
        """Close the pipe, unless the pipe is closed."""
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
                return  # closed by a callback before, in the same round
            with suppress(BlockingIOError):
                os.read(self._read, 4096)
