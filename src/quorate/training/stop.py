"""Stops: one object that whoever wants a run to end tells, and the signals that do.

Ctrl-C and SIGTERM ask for an orderly end, a second one ends at once; SIGUSR1 asks for a save. A
time limit, ``Trainer.stop`` and callbacks ask in the same way. The first reason counts.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any


class Stops:
    """Whether a run is to end, and why. Any thread, also a signal handler, may ask.

    It takes no lock: a signal handler may run in the middle of another call of the same thread.
    """

    def __init__(self) -> None:
        self.reason: str | None = None  # the first one
        self._listeners: list[Callable[[str], None]] = []

    def ask(self, reason: str) -> None:
        """Finish what is under way, then end."""
        if self.reason is None:
            self.reason = reason
        for tell in tuple(self._listeners):
            tell(self.reason)

    @contextmanager
    def telling(self, listener: Callable[[str], None]) -> Iterator[None]:
        """Within the block the listener is told; at once, if there is a reason already.

        It may be told more than once.
        """
        self._listeners.append(listener)
        try:
            if self.reason is not None:
                listener(self.reason)
            yield
        finally:
            self._listeners.remove(listener)

    @contextmanager
    def after(self, seconds: float | None, reason: str) -> Iterator[None]:
        """Within the block, ask when so much time has passed."""
        if seconds is None:
            yield
            return
        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self.ask, (reason,))
        timer.name = "quorate-time-limit"
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


class Signals:
    """While it is entered, signals are what a run is told with.

    The first SIGINT or SIGTERM asks for a stop, the second raises; SIGUSR1 calls ``save``. As long
    as nothing is ``under_way`` there is nothing to finish, and the first one raises. Python
    delivers signals to the main thread alone; in another thread this does nothing.
    """

    def __init__(self, stops: Stops, save: Callable[[], None]) -> None:
        self.received: signal.Signals | None = None
        self.under_way = False
        self._stops = stops
        self._save = save
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

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {
                n: signal.signal(n, self._stop) for n in (signal.SIGINT, signal.SIGTERM)
            }
            with suppress(AttributeError):  # a system without it
                number = signal.SIGUSR1
                self._before[number] = signal.signal(number, lambda _number, _frame: self._save())
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        again = self.received is not None
        self.received = signal.Signals(number)
        if again or not self.under_way:
            self.leave()
        self._stops.ask(self.received.name)
