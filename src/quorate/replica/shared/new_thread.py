"""What a new thread has: no gradients switched off, no autocast, no default device of the script's.

What a script has around its training loop is the thread's that runs the script, and reaches no
shard: shards are computed alike on one worker and on many, most of which are threads of their own.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch

from quorate.machine.devices import current
from quorate.replica.quick.torch_calls import makes_on_cpu

_CPU = torch.device("cpu")


class as_in_a_new_thread:  # noqa: N801
    """Within the block the calling thread computes as a worker's own would.

    A class, as a generator's context takes three times as long to enter: each run of shards does.
    One may be entered again and again.

    Args:
        threads: intra-op threads. The bits of a matrix product depend on it.
        device: that "cuda" without a number means.
    """

    __slots__ = ("_device", "_had_cache", "_had_threads", "_kinds", "_otherwise", "_threads")

    def __init__(self, threads: int, device: torch.device) -> None:
        self._threads, self._device, self._kinds = threads, device, _kinds(device.type)

    def __enter__(self) -> None:
        self._had_threads = torch.get_num_threads()
        self._had_cache = torch.is_autocast_cache_enabled()
        torch.set_num_threads(self._threads)  # OpenMP keeps this number per thread
        # Autocast's cache of cast weights is the process's, and any thread that leaves autocast
        # empties it: whether a weight is cast once or twice would depend on the other towers.
        torch.set_autocast_cache_enabled(False)
        self._otherwise: ExitStack | None = None  # of a thread that is not as a new one is
        if self._device != _CPU or not _is_plain(self._kinds):
            try:
                self._otherwise = _as_in_a_new_thread(self._kinds, self._device)
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


def _as_in_a_new_thread(kinds: Collection[str], device: torch.device) -> ExitStack:
    """Enter what makes the calling thread like a new one, and return it, to be left."""
    with ExitStack() as stack:
        stack.enter_context(current(device))
        if not _is_plain(kinds):
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            for kind in filter(torch.is_autocast_enabled, kinds):
                stack.enter_context(torch.autocast(kind, enabled=False))
            stack.enter_context(_CPU)  # what is made without a device
        return stack.pop_all()


@cache
def _kinds(kind: str) -> tuple[str, ...]:
    return tuple(each for each in {"cpu", kind} if torch.amp.is_autocast_available(each))


def _is_plain(kinds: Collection[str]) -> bool:
    """Return whether the calling thread is as a new one is, as far as shards can tell."""
    return (
        torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and not any(map(torch.is_autocast_enabled, kinds))
        and makes_on_cpu()
    )
