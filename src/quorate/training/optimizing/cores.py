"""Cores: how many an update takes, and work that is spread over them without changing a bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Thread
from typing import TypeVar

import torch

from quorate.machine.resources import usable_cores

T = TypeVar("T")

# With fewer elements one core is as good: OpenMP's threads spin for milliseconds when they are
# done, on the cores that workers need next.
ALL_CORES_FROM = 1 << 24


def cores_for(elements: int) -> int:
    """Return how many cores work has that gives the same bits on any number of them."""
    return usable_cores() if elements >= ALL_CORES_FROM else 1


class intra_op_threads:  # noqa: N801
    """Within the block this thread's operations use so many threads.

    A class, as a generator's context takes three times as long to enter: each update does.
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


def side_by_side(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Return what tasks return, of which each has a core to itself. Blocks.

    For tasks of many short operations. OpenMP's threads would wait for each other after every one
    of them: where one has lost its core to another program, each of a thousand waits is a turn of
    the scheduler's, and an update takes seconds.
    """
    results: dict[int, T] = {}
    raised: list[BaseException] = []

    def do(number: int) -> None:
        try:
            with torch.no_grad(), intra_op_threads(1):
                results[number] = tasks[number]()
        except BaseException as error:  # raised where it is waited for
            raised.append(error)

    others: list[Thread] = []
    try:
        for number in range(1, len(tasks)):
            thread = Thread(target=do, args=(number,), name="update")
            try:
                thread.start()
            except RuntimeError:  # there is no room for a thread: the bits are the same without it
                do(number)
            else:
                others.append(thread)
        do(0)
    finally:
        # Also if a signal ends this thread's part: nobody is to write behind its back.
        for thread in others:
            thread.join()
    if raised:
        raise raised[0]
    return [results[number] for number in range(len(tasks))]
