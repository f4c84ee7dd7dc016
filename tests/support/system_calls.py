"""System calls of a thread: counted, and the process killed before one of them."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

# Functions of ``os`` and methods of files that ask the system for nothing.
NO_CALLS = ("fspath", "getpid", "urandom", "closed", "fileno", "readable", "writable")


@dataclass
class SystemCalls:
    """Counts the system calls of one thread: give it to ``sys.setprofile`` or ``threading``'s.

    A call is a function of ``os``, or a method of a file, that the interpreter has in C. What such
    a method writes in several pieces counts as one call.
    """

    thread: str  # its name; other threads are not counted
    last: int  # the number of the call before which the process gets SIGKILL; 0: it lives
    counted: Callable[[], object]  # is called at each call
    count: int = 0

    def __call__(self, _frame: FrameType, event: str, called: Any) -> None:
        """Take notice of an event of ``sys.setprofile``."""
        if threading.current_thread().name != self.thread:
            sys.setprofile(None)  # of this thread
        elif event == "c_call" and _asks_the_system(called):
            self.count += 1
            self.counted()
            if self.count == self.last:
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
