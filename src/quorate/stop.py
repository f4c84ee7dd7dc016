"""Stops: Ctrl-C and SIGTERM ask for an orderly end; a second one ends at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class StopSignals:
    """While it is entered, the first SIGINT or SIGTERM calls ``stop``, the second raises.

    Python delivers signals to the main thread alone; in another thread this does nothing.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, stop: Callable[[str], None]) -> None:
        self.received: signal.Signals | None = None
        self._stop = stop
        self._before: dict[signal.Signals, Any] = {}

    def leave(self) -> None:
        """Leave the process as the signal that was received would have; return if none was.

        Raises:
            KeyboardInterrupt: SIGINT was received.
            SystemExit: SIGTERM was, with the status a shell expects.
        """
        if self.received is signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is not None:
            raise SystemExit(128 + self.received)

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in self.SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        again = self.received is not None
        self.received = signal.Signals(number)
        if again:
            self.leave()
        self._stop(self.received.name)
