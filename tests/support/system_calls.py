"""System calls of a thread: counted, and the process killed before a chosen call."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

# Functions of ``os`` and methods of files without a system call.
NO_CALLS = ("fspath", "getpid", "urandom", "closed", "fileno", "readable", "writable")


@dataclass
class SystemCalls:
    """Counts a thread's system calls: give the object to ``sys.setprofile`` or ``threading``'s.

    A call is a function of ``os``, or a method of a file, written in C. Several pieces of a write
    count as a single call.
    """

    thread: str  # the name of the only counted thread
    last: int  # the number of the call before SIGKILL; 0: the process lives
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
    """Do something in a fork, killed before a system call of a thread.

    Args:
        action: the action. An exception makes the exit code 1.
        thread: the name of the thread whose calls count.
        last: the number of the call; 0: the fork comes to its end.

    Returns:
        The fork's exit code, and the number of calls.
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
