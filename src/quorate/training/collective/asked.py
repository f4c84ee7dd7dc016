"""Asked to end: the signals of a rank other than 0, which rank 0 hears of."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

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
        os.register_at_fork(after_in_child=_forget_the_rank)
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        threading.Thread(target=self._run, name="quorate-signals", daemon=True).start()
        for number in JOB_SIGNALS:
            signal.signal(number, lambda _number, _frame: None)

    def _run(self) -> None:
        while received := os.read(self._read, 64):
            if signal.SIGTERM in received and self.by is None:
                self.by = signal.SIGTERM.name
                self._tell(self.by)


def _forget_the_rank() -> None:
    """Give a fork of user code, such as a worker of ``multiprocessing``, its SIGTERM back.

    The fork has the rank's handler, which does nothing, so ``Pool.terminate`` could not end it. And
    the number of the signal would go into the rank's pipe, whose thread would end the run. What a
    terminal sends to the whole job the fork still ignores: the rank finishes its step.
    """
    with suppress(ValueError):  # Python takes the thread that forked for the main one, or not
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
