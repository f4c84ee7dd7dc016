"""Stops: one object that whoever wants a run to end tells, and the signals that do.

Ctrl-C, SIGTERM and SIGHUP (a closed terminal) ask for an orderly end, a second one ends at once;
SIGUSR1 asks for a save. A time limit, ``Trainer.stop`` and callbacks ask in the same way. The first
reason counts.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from quorate.machine import signal_handlers
from quorate.machine.descriptors import any_readable
from quorate.machine.limits import SIGNALLED_EXIT_S
from quorate.machine.signal_handlers import LeftError

# They ask for a stop; SIGHUP is not everywhere.
STOP_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


class Stops:
    """Whether a run is to end, and why. Any thread, also a signal handler, may ask.

    It takes no lock: a signal handler may run in the middle of another call of the same thread.
    """

    def __init__(self) -> None:
        self.reason: str | None = None  # the first one
        self.exit_code: int | None = None  # with which to leave after it; None: as it comes
        self._listeners: list[Callable[[str], None]] = []
        self._waiting: list[threading.Timer] = []  # for ``begin``

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
        """Within the block, ask when so much time has passed since ``begin``."""
        if seconds is None:
            yield
            return
        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self.ask, (reason,))
        timer.name = "quorate-time-limit"
        timer.daemon = True
        self._waiting.append(timer)
        try:
            yield
        finally:
            timer.cancel()
            if timer in self._waiting:
                self._waiting.remove(timer)
            else:
                timer.join()

    def begin(self) -> None:
        """Have time limits count from now on: the first shard is about to be computed."""
        while self._waiting:
            self._waiting.pop().start()


class Signals:
    """While it is entered, signals are what a run is told with.

    The first SIGINT, SIGTERM or SIGHUP asks for a stop, the second raises; SIGUSR1 calls ``save``.
    As long as nothing is ``under_way`` there is nothing to finish, and the first one raises. A
    SIGHUP that is ignored (nohup) stays so. Python delivers signals to the main thread alone; in
    another thread this does nothing.

    Python calls a handler when the main thread is back from what it calls, which may be never. So
    the process ends ``SIGNALLED_EXIT_S`` after the second signal in any case, and with the third.
    """

    def __init__(self, stops: Stops, save: Callable[[], None]) -> None:
        self.received: signal.Signals | None = None
        self.under_way = False
        self._stops = stops
        self._save = save
        self._handlers: dict[int, Any] = {}  # by number
        self._insistence: _Insistence | None = None

    def leave(self) -> None:
        """Leave the process as the signal that was received would have; return if none was.

        Raises:
            KeyboardInterrupt: SIGINT was received.
            SystemExit: another was, here or on another rank, with the status a shell expects.
        """
        if self.received is signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is not None:
            raise LeftError(128 + self.received)
        if self._stops.exit_code is not None:
            raise LeftError(self._stops.exit_code)

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                ignored = signal.getsignal(number) is signal.SIG_IGN
                if not (ignored and number not in (signal.SIGINT, signal.SIGTERM)):
                    self._handlers[number] = self._stop
            self._insistence = _Insistence(frozenset(self._handlers))
            with suppress(AttributeError):  # a system without it
                self._handlers[signal.SIGUSR1] = lambda _number, _frame: self._save()
            for number, handler in self._handlers.items():
                signal_handlers.handle(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        if self._insistence is not None:
            self._insistence.close()
            self._insistence = None
        signal_handlers.put_back(self._handlers.values())

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        again = self.received is not None
        self.received = signal.Signals(number)
        if again or not self.under_way:
            self.leave()
        if self.received is not signal.SIGINT:
            self._stops.exit_code = 128 + number
        self._stops.ask(self.received.name)


_CLOSES = b"\0"  # no signal has this number


class _Insistence:
    """Ends the process after a second signal, whatever the main thread is in. ``close`` it.

    The interpreter writes the number of each signal to a pipe when it comes, and not when its
    handler is called. A thread reads them.

    Args:
        numbers: the signals that are meant.
    """

    def __init__(self, numbers: frozenset[int]) -> None:
        self._numbers = numbers
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        # An event loop of asyncio has one too, which gets its numbers on.
        self._other = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._is_open = True
        self._forget_forks = signal_handlers.in_forks(self._leave_to_parent)
        self._thread = threading.Thread(target=self._run, name="quorate-signals", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # there is no room for a thread
            self._close()
            raise

    def close(self) -> None:
        """Leave signals to their handlers, as before."""
        if self._is_open:  # else this is a fork
            signal.set_wakeup_fd(self._other)
            os.set_blocking(self._write, True)
            os.write(self._write, _CLOSES)
            self._thread.join()
            self._close()

    def _close(self) -> None:
        signal.set_wakeup_fd(self._other)
        self._forget_forks()
        os.close(self._write)
        os.close(self._read)

    def _leave_to_parent(self) -> None:
        """In a fork: the pipe is the parent's, who would take the fork's signals for its own."""
        self._is_open = False
        with suppress(ValueError):  # another thread than the main one forked
            signal.set_wakeup_fd(-1)
        os.close(self._write)
        os.close(self._read)

    def _run(self) -> None:
        came = 0
        while any_readable(self._read, timeout_s=SIGNALLED_EXIT_S if came >= 2 else None):
            received = os.read(self._read, 64)
            if _CLOSES in received:
                return
            if self._other >= 0:
                with suppress(OSError):
                    os.write(self._other, received)
            for number in received:
                if number in self._numbers:
                    came, last = came + 1, number
            if came >= 3:
                break
        with suppress(OSError):
            os.write(2, f"quorate: signal {last} again, stopped at once\n".encode())
        os._exit(128 + last)
