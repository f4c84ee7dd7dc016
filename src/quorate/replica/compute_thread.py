"""Compute threads: the same settings, and so the same bits, in every thread that computes shards.

Settings of the script around the training loop (autocast, no_grad, a default device) belong to the
script's thread, and reach no shard: a single worker computes like many workers, most of them in
threads of their own.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from functools import cache
from typing import Any, TypeVar

import torch

from quorate.machine.devices import current
from quorate.replica.quick.torch_calls import makes_on_cpu

CPU = torch.device("cpu")
Thread = TypeVar("Thread", bound=threading.Thread)


def become_compute_thread(threads: int, device: torch.device) -> None:
    """Prepare the calling thread, a new thread, to compute shards.

    Args:
        threads: intra-op threads. The bits of a matrix product depend on the number.
        device: the device meant by "cuda" without a number.
    """
    torch.set_num_threads(threads)  # OpenMP keeps this number per thread
    # The autocast cache of cast weights belongs to the process, and is emptied when any thread
    # leaves autocast: the number of casts of a weight would depend on unrelated threads.
    torch.set_autocast_cache_enabled(False)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)


def interrupt(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raise an error in a thread, at the next line of Python there. Ends user code in a loop."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(error)
    )


def end_threads(
    threads: Iterable[Thread], error: type[BaseException], wait_s: float, interrupted_s: float
) -> list[Thread]:
    """Wait for threads to end, interrupt those that have not, and wait again. Blocks.

    Args:
        threads: were asked to end.
        error: raised in the threads that have not ended after ``wait_s`` seconds.
        wait_s: for all threads together.
        interrupted_s: the same after the interruption.

    Returns:
        The threads that still run.
    """
    alive = _alive_after(threads, wait_s)
    for thread in alive:
        interrupt(thread, error)
    return _alive_after(alive, interrupted_s)


def _alive_after(threads: Iterable[Thread], seconds: float) -> list[Thread]:
    """Return the threads that have not ended after some seconds."""
    deadline, alive = time.monotonic() + seconds, []
    for thread in threads:
        thread.join(timeout=max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            alive.append(thread)
    return alive


class as_compute_thread:  # noqa: N801
    """A context in which the calling thread, the script's, has the settings of a compute thread.

    A class, because entering a generator's context takes three times as long, and each run of
    shards enters the context. A context may be entered repeatedly. Arguments as of
    ``become_compute_thread``.
    """

    __slots__ = ("_device", "_had_cache", "_had_threads", "_kinds", "_otherwise", "_threads")

    def __init__(self, threads: int, device: torch.device) -> None:
        self._threads, self._device, self._kinds = threads, device, _kinds(device.type)

    def __enter__(self) -> None:
        self._had_threads = torch.get_num_threads()
        self._had_cache = torch.is_autocast_cache_enabled()
        become_compute_thread(self._threads, CPU)
        self._otherwise: ExitStack | None = None  # for a thread that differs from a new thread
        if self._device != CPU or not _is_plain(self._kinds):
            try:
                self._otherwise = _as_compute_thread(self._kinds, self._device)
            except BaseException:
                self._put_back()
                raise

    def __exit__(self, *raised: Any) -> None:
        try:
            if self._otherwise is not None:
                self._otherwise.__exit__(*raised)
        finally:
            self._put_back()

    def _put_back(self) -> None:
        torch.set_autocast_cache_enabled(self._had_cache)
        if torch.get_num_threads() != self._had_threads:
            torch.set_num_threads(self._had_threads)


def _as_compute_thread(kinds: Collection[str], device: torch.device) -> ExitStack:
    """Enter contexts that give the calling thread a new thread's settings; return the contexts."""
    with ExitStack() as stack:
        stack.enter_context(current(device))
        if not _is_plain(kinds):
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            for kind in filter(torch.is_autocast_enabled, kinds):
                stack.enter_context(torch.autocast(kind, enabled=False))
            stack.enter_context(CPU)  # default device of new tensors
        return stack.pop_all()


@cache
def _kinds(kind: str) -> tuple[str, ...]:
    return tuple(each for each in {"cpu", kind} if torch.amp.is_autocast_available(each))


def _is_plain(kinds: Collection[str]) -> bool:
    """Return whether the calling thread has a new thread's settings, as far as shards can tell."""
    return (
        torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and not any(map(torch.is_autocast_enabled, kinds))
        and makes_on_cpu()
    )
