"""Asked to end: the signals of a rank other than 0, which rank 0 hears of."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

from quorate.machine import signal_handlers
from quorate.machine.dies_with_parent import JOB_SIGNALS


def end_by_signals() -> None:
    """Until the ranks have met, a signal ends this process: nobody waits for it."""
    if threading.current_thread() is threading.main_thread():
        for number in JOB_SIGNALS:
            signal.signal(number, signal.SIG_DFL)


class Asked:
    """Whether this rank was asked to end by SIGTERM; other signals reach rank 0 too.

    Python calls a handler when the main thread is back from what it calls, and that may be an
    evaluation of rank 0 that it waits for. So a thread reads the pipe that the interpreter writes
    the numbers of signals to, as they come.

    Args:
        tell: is told, in that thread, by which signal.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.by: str | None = None
        self._tell = tell
        if threading.current_thread() is not threading.main_thread():
            return  # a script that trains in another thread has no signals
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal_handlers.in_forks(_leave_pipe_to_rank)
        threading.Thread(target=self._run, name="quorate-signals", daemon=True).start()
        signal_handlers.ignore_job_signals(signal_handlers.OF_PYTHON)

    def _run(self) -> None:
        while received := os.read(self._read, 64):
            if signal.SIGTERM in received and self.by is None:
                self.by = signal.SIGTERM.name
                self._tell(self.by)


def _leave_pipe_to_rank() -> None:
    """In a fork of user code: the pipe is the rank's, which would end as if asked to."""
    with suppress(ValueError):  # another thread than the main one forked
        signal.set_wakeup_fd(-1)
