"""System calls of a thread: counted, and the process killed before one of them."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

# Functions of ``os`` and methods of files that ask the system for nothing.
NO_CALLS = ("fspath", "getpid", "urandom", "closed", "fileno", "readable", "writable")


class SystemCalls:
    """Counts the system calls of one thread: give it to ``sys.setprofile`` or ``threading``'s.

    A call is a function of ``os``, or a method of a file, that the interpreter has in C. What such
    a method writes in several pieces counts as one call.

    Args:
        thread: the name of the thread; other threads are not counted.
        last: the number of the call before which the process gets SIGKILL; 0: it lives.
        counted: is called at each call.
    """

    def __init__(self, thread: str, last: int, counted: Callable[[], object]) -> None:
        self._thread, self._last, self._counted = thread, last, counted
        self._count = 0

    def __call__(self, _frame: FrameType, event: str, called: Any) -> None:
        """Take notice of an event of ``sys.setprofile``."""
        if threading.current_thread().name != self._thread:
            sys.setprofile(None)  # of this thread
        elif event == "c_call" and _asks_the_system(called):
            self._count += 1
            self._counted()
            if self._count == self._last:
                os.kill(os.getpid(), signal.SIGKILL)


def _asks_the_system(called: Any) -> bool:
    modules = (called.__module__, type(getattr(called, "__self__", None)).__module__)
    return ("posix" in modules[:1] or "_io" in modules) and called.__name__ not in NO_CALLS


def forked(action: Callable[[], object], thread: str, last: int = 0) -> tuple[int, int]:
    """Do something in a fork, which is killed before a system call of one of its threads.

    Args:
        action: what is done. It may raise, and then the exit code is 1.
        thread: the name of the thread whose calls count.
        last: the number of the call; 0: the fork comes to its end.

    Returns:
        The fork's exit code, and how many calls it made.
    """
    ours, theirs = os.pipe()
    if (pid := os.fork()) == 0:
        code = 1
        try:
            calls = SystemCalls(thread, last, lambda: os.write(theirs, b"."))
            threading.setprofile(calls)
            sys.setprofile(calls)
            action()
            sys.setprofile(None)
            code = 0
        finally:
            os._exit(code)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        count = len(pipe.read())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), count
