"""A forked child: a process that runs a function of this process and dies with this process.

A fork, because datasets and models cannot be pickled in general. Where forks are not safe (on other
systems than Linux) the child is a new interpreter, and the function and its arguments are pickled.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import Any

import torch

from quorate.machine.dies_with_parent import JOB_SIGNALS, die_with
from quorate.machine.freed_memory import keep_freed_memory
from quorate.machine.limits import KILLED_EXIT_S
from quorate.machine.signal_handlers import ignore_job_signals


class ForkedChild:
    """A daemon process that ignores the signals of a job. End the child with ``end_children``.

    Args:
        name: name of the process, after "quorate-".
        run: the function called in the child.
        arguments: arguments of ``run``.
        closes: sockets of the parent. The child closes its copies: while a copy is open, the peers
            do not notice the parent's death.
        threads: number of intra-op threads of the child.

    Raises:
        OSError: there are too many processes, or there is no memory.
    """

    def __init__(
        self,
        name: str,
        run: Callable[..., None],
        *arguments: Any,
        closes: Sequence[socket.socket],
        threads: int,
    ) -> None:
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
        # The parent's number is read here: a child whose parent is gone would read the number of
        # the adopting process, and stay for ever.
        given = os.getpid(), closes, threads, run, arguments
        self._process = context.Process(
            target=_main, args=given, name=f"quorate-{name}", daemon=True
        )
        # A signal of the job that arrives before the child ignores such signals waits until then.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # At the exit of the parent, before multiprocessing waits for its processes.
        self._at_exit = Finalize(None, self.kill, exitpriority=10)
        assert self._process.pid is not None  # the child has started
        self.pid: int = self._process.pid
        self.sentinel = self._process.sentinel  # a descriptor, readable when the child has ended

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit code, -n after signal n; None if the child outlives the timeout."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def kill(self) -> None:
        """Send signal 9, unless the child is closed. Does not block."""
        with suppress(ValueError):
            self._process.kill()

    def close(self) -> None:
        """Wait for the end of a killed child, no longer than the kernel usually takes."""
        self._process.join(KILLED_EXIT_S)
        with suppress(ValueError):  # the child hangs in the kernel, and runs no code until the end
            self._process.close()
        self._at_exit.cancel()


def end_children(children: Sequence[ForkedChild], within_s: float = 0.0) -> None:
    """Wait for the end of all children for some seconds, kill the rest, and close all. Blocks."""
    deadline = time.monotonic() + within_s
    for child in children:
        child.wait(max(0.0, deadline - time.monotonic()))
    for child in children:
        child.kill()
    for child in children:
        child.close()


def _main(
    parent: int,
    closes: Sequence[socket.socket],
    threads: int,
    run: Callable[..., None],
    arguments: Sequence[Any],
) -> None:
    die_with(parent)
    ignore_job_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)
    for end in closes:
        os.close(end.detach())
    keep_freed_memory()
    torch.set_num_threads(threads)
    run(*arguments)
