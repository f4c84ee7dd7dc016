"""Stops: the requests to end a run, and signals as such requests.

Ctrl-C, SIGTERM and SIGHUP (a closed terminal) request an orderly end; a second signal ends the run
at once; SIGUSR1 requests a save. A time limit, ``Trainer.stop`` and callbacks request an end in the
same way. The first reason counts.
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
from quorate.machine.dies_with_parent import JOB_SIGNALS
from quorate.machine.limits import SIGNALLED_EXIT_S
from quorate.machine.signal_handlers import LeftError

# Signals that request a stop; some systems lack SIGHUP.
STOP_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


class Stops:
    """Requests to end a run, from any thread or signal handler, with a reason.

    No lock is taken: a signal handler may run in the middle of another call of the same thread.
    """

    def __init__(self) -> None:
        self.reason: str | None = None  # the first reason
        self.exit_code: int | None = None  # exit code after the stop; None: the usual one
        self._listeners: list[Callable[[str], None]] = []
        self._waiting: list[threading.Timer] = []  # for ``start_time_limits``

    def request(self, reason: str) -> None:
        """Finish the current step, then end."""
        if self.reason is None:
            self.reason = reason
        for listener in tuple(self._listeners):
            listener(self.reason)

    @contextmanager
    def calling(self, listener: Callable[[str], None]) -> Iterator[None]:
        """Call the listener at a stop inside the block; at once, if there is a reason already.

        The listener may be called more than once.
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
        """Request a stop inside the block, after a time in seconds since ``start_time_limits``."""
        if seconds is None:
            yield
            return
        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self.request, (reason,))
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

    def start_time_limits(self) -> None:
        """Start the time limits: the first shard is about to be computed."""
        while self._waiting:
            self._waiting.pop().start()


class Signals:
    """A context in which signals request stops and saves.

    The first SIGINT, SIGTERM or SIGHUP requests a stop, the second raises; SIGUSR1 calls ``save``.
    Unless ``has_step_to_finish``, the first signal raises. An ignored SIGHUP (nohup) stays ignored.
    Python delivers signals to the main thread alone; in another thread the context does nothing.

    Python calls a handler when the main thread returns from foreign code, which may be never. So
    the process ends ``SIGNALLED_EXIT_S`` after the second signal in any case, and with the third.
    """

    def __init__(self, stops: Stops, save: Callable[[], None]) -> None:
        self.received: signal.Signals | None = None
        self.has_step_to_finish = False
        self._stops = stops
        self._save = save
        self._handlers: dict[int, Any] = {}  # by number
        self._insistence: _Insistence | None = None

    def raise_received(self) -> None:
        """Leave the process in the way of the received signal; return without a signal.

        Raises:
            KeyboardInterrupt: SIGINT was received.
            SystemExit: another signal was received, on this rank or another, with a shell's exit
                status.
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
            with suppress(AttributeError):  # a system without SIGUSR1
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
        if again or not self.has_step_to_finish:
            self.raise_received()
        if self.received is not signal.SIGINT:
            self._stops.exit_code = 128 + number
        self._stops.request(self.received.name)


_CLOSES = b"\0"  # no signal has this number


class _Insistence:
    """A watchdog: ends the process after a second signal, whatever code the main thread runs.

    The interpreter writes the number of each signal to a pipe when the signal arrives, before its
    handler is called. A thread reads the numbers. ``close`` ends the thread.

    Args:
        numbers: the signals to watch.
    """

    def __init__(self, numbers: frozenset[int]) -> None:
        self._numbers = numbers
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        # An event loop of asyncio has such a pipe too: numbers are passed on to it.
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
        """Leave signals to their former handlers."""
        if self._is_open:  # False in a fork
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
        """Leave the pipe to the parent: a fork's signals would be counted as the parent's."""
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


# --- signals to a rank other than 0 ---------------------------------------------------------------


def end_by_signals() -> None:
    """Let signals end this process until the ranks have met: no rank waits for an update yet."""
    if threading.current_thread() is threading.main_thread():
        for number in JOB_SIGNALS:
            signal.signal(number, signal.SIG_DFL)


def watch_for_sigterm(tell: Callable[[str], None]) -> None:
    """Pass SIGTERM to this rank on; rank 0 receives the remaining signals itself.

    Python calls a signal handler only when the main thread returns from C code, and the main thread
    may wait there for a long evaluation on rank 0. So a thread reads the pipe to which the
    interpreter writes the numbers of signals at once.

    Args:
        tell: called in the reading thread, with the name of the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread can install signal handlers
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal_handlers.in_forks(_leave_pipe_to_rank)

    def run() -> None:
        while received := os.read(read, 64):
            if signal.SIGTERM in received:
                tell(signal.SIGTERM.name)

    threading.Thread(target=run, name="quorate-signals", daemon=True).start()
    signal_handlers.ignore_job_signals(signal_handlers.OF_PYTHON)


def _leave_pipe_to_rank() -> None:
    """Detach a fork of user code from the pipe: a signal to the fork would end the rank."""
    with suppress(ValueError):  # a thread besides the main thread forked
        signal.set_wakeup_fd(-1)
