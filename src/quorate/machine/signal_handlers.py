"""Signal handlers of quorate, which forks of user code do not keep.

A fork inherits handlers, and the descriptor to which the interpreter writes the numbers of signals.
``multiprocessing.Pool`` in a dataset or a callback ends processes by SIGTERM: a handler of quorate
would only note the signal, and the pool would wait for ever. So a fork gets back the earlier
handlers. Processes forked by quorate install handlers again.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any, NamedTuple

from quorate.machine.dies_with_parent import JOB_SIGNALS

# The handlers of a fresh Python process.
OF_PYTHON: Mapping[int, Any] = {
    number: signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    for number in JOB_SIGNALS
}


class _InstalledHandler(NamedTuple):
    """A handler of quorate's, and the replaced handler."""

    number: int
    handler: Any
    before: Any


_handlers: list[_InstalledHandler] = []  # in the order of installation
_in_forks: list[Callable[[], None]] = []  # called in a fork
_mask = threading.local()  # per forking thread: the signal mask before the fork


def handle(number: int, handler: Any, before: Any = None) -> None:
    """Install a handler until ``put_back``, in this process and in no fork.

    Args:
        number: number of the signal.
        handler: a handler for ``signal.signal``.
        before: handler of forks; None: the handler installed now.

    Raises:
        ValueError: this is not the main thread.
    """
    _watch_forks()
    now = signal.getsignal(number)
    if now == handler:
        return
    signal.signal(number, handler)
    _handlers.append(_InstalledHandler(number, handler, now if before is None else before))


def put_back(handlers: Iterable[Any]) -> None:
    """Undo ``handle`` for some handlers, except where user code has replaced a handler."""
    wanted = [*handlers]
    for entry in [*reversed(_handlers)]:
        if entry.handler in wanted:
            _handlers.remove(entry)
            _put_back(entry)


def in_forks(call: Callable[[], None]) -> Callable[[], None]:
    """Call a function in each fork, until a call of the returned function."""
    _watch_forks()
    _in_forks.append(call)
    return lambda: _in_forks.remove(call)


def ignore_job_signals(before: Mapping[int, Any] | None = None) -> None:
    """Ignore the signals of a job, which reach all processes: only the coordinator acts on them.

    Programs started by user code in this process do not ignore the signals: an empty handler ends
    with ``exec``, and SIG_IGN would not.

    Args:
        before: handlers of forks; None: the handlers installed now.

    Raises:
        ValueError: this is not the main thread.
    """
    for number in JOB_SIGNALS:
        handle(number, _do_nothing, None if before is None else before[number])
        signal.siginterrupt(number, False)  # restart interrupted system calls


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """Ignore a signal."""


def _put_back(entry: _InstalledHandler) -> None:
    # None: a handler installed by C code, which Python cannot restore.
    if entry.before is not None and signal.getsignal(entry.number) == entry.handler:
        signal.signal(entry.number, entry.before)


def _watch_forks() -> None:
    if not _forks_are_watched and hasattr(os, "register_at_fork"):
        _forks_are_watched.append(True)
        os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_forget)


_forks_are_watched: list[bool] = []


def _hold() -> None:
    # A signal that reaches a fork before its handlers are restored would be lost, and would be
    # written to the pipe of its parent: block signals until then.
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _forget() -> None:
    for call in _in_forks:
        call()
    _in_forks.clear()
    for entry in reversed(_handlers):
        _put_back(entry)
    _handlers.clear()
    _release()


class LeftError(SystemExit):
    """An immediate end for a signal, as distinct from a ``sys.exit()`` of the interrupted code."""


def ends_program(error: BaseException) -> bool:
    """Return whether an exception is Ctrl-C or a signal's, both raised in the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    return isinstance(error, (KeyboardInterrupt, LeftError)) and is_main
