"""The request to end a rank other than 0 by a signal, passed on to rank 0."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

from quorate.machine import signal_handlers
from quorate.machine.dies_with_parent import JOB_SIGNALS


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
