"""Cores: how many cores an update uses, and how work is spread over cores without changing bits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Thread
from typing import TypeVar

import torch

from quorate.machine.resources import usable_cores
from quorate.machine.shared_setting import SharedSetting

T = TypeVar("T")

# With fewer elements one core is as fast: after an operation, OpenMP's threads spin for
# milliseconds on cores that workers need next.
ALL_CORES_FROM = 1 << 24
# More cores than these exceed the memory's bandwidth, and wait for the interpreter's lock.
MOST_CORES = 8


def cores_for(elements: int) -> int:
    """Return the number of cores for work whose bits do not depend on the number of cores."""
    return usable_cores() if elements >= ALL_CORES_FROM else 1


class intra_op_threads:  # noqa: N801
    """A context that sets the number of threads within this thread's operations.

    A class, because entering a generator's context takes three times as long, and each update
    enters the context.
    """

    __slots__ = ("_before", "_threads")

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        if self._before != self._threads:
            torch.set_num_threads(self._threads)

    def __exit__(self, *_: object) -> None:
        if torch.get_num_threads() != self._before:
            torch.set_num_threads(self._before)


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.threads = SharedSetting(torch.get_num_threads, torch.set_num_threads)


_of_thread = _OfThread()


def threads_of_loop(threads: int) -> AbstractContextManager[int]:
    """Return a context like ``intra_op_threads`` for a loop, which may overlap with others."""
    return _of_thread.threads.at(threads)


def side_by_side(work: Callable[[int, int], T], count: int, cores: int) -> list[T]:
    """Do a number of short pieces of work, a run of consecutive pieces on each core. Blocks.

    OpenMP's threads would wait for each other after every operation: when another program takes a
    core, each of a thousand waits lasts a time slice of the scheduler, and an update takes seconds.

    Args:
        work: does the pieces from a first number to an end.
        count: number of pieces.
        cores: the largest number of cores.

    Returns:
        The results of ``work``, in order.
    """
    cores = max(1, min(cores, MOST_CORES, count))
    ends = [count * n // cores for n in range(cores + 1)]
    results: dict[int, T] = {}
    raised: list[BaseException] = []

    def do(number: int) -> None:
        try:
            with torch.no_grad(), intra_op_threads(1):
                results[number] = work(ends[number], ends[number + 1])
        except BaseException as error:  # raised again by the waiting thread
            raised.append(error)

    others: list[Thread] = []
    try:
        for number in range(1, cores):
            thread = Thread(target=do, args=(number,), name="update")
            try:
                thread.start()
            except RuntimeError:  # no room for a thread: the bits are the same without it
                do(number)
            else:
                others.append(thread)
        do(0)
    finally:
        # Also if a signal interrupts this thread's part: no thread may write after the return.
        for thread in others:
            thread.join()
    if raised:
        raise raised[0]
    return [results[number] for number in range(cores)]
