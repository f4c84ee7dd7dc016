"""What a new thread has: no gradients switched off, no autocast, no default device of the script's.

What a script has around its training loop is the thread's that runs the script, and reaches no
shard: shards are computed alike on one worker and on many, most of which are threads of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import torch

from quorate.machine.devices import current

_CPU = torch.device("cpu")


@contextmanager
def as_in_a_new_thread(threads: int, device: torch.device) -> Iterator[None]:
    """Within the block the calling thread computes as a worker's own would: 3 us.

    Args:
        threads: intra-op threads. The bits of a matrix product depend on it.
        device: that "cuda" without a number means.
    """
    had_threads, had_cache = torch.get_num_threads(), torch.is_autocast_cache_enabled()
    kinds = _kinds(device.type)
    torch.set_num_threads(threads)  # OpenMP keeps this number per thread
    # Autocast's cache of cast weights is the process's, and any thread that leaves autocast
    # empties it: whether a weight is cast once or twice would depend on the other towers.
    torch.set_autocast_cache_enabled(False)
    try:
        if device == _CPU and _is_plain(kinds):
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(current(device))
            if _is_plain(kinds):
                yield
                return
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            for kind in filter(torch.is_autocast_enabled, kinds):
                stack.enter_context(torch.autocast(kind, enabled=False))
            stack.enter_context(_CPU)  # what is made without a device
            yield
    finally:
        torch.set_autocast_cache_enabled(had_cache)
        if torch.get_num_threads() != had_threads:
            torch.set_num_threads(had_threads)


@cache
def _kinds(kind: str) -> tuple[str, ...]:
    return tuple(each for each in {"cpu", kind} if torch.amp.is_autocast_available(each))


def _is_plain(kinds: Collection[str]) -> bool:
    """Return whether the calling thread is as a new one is, as far as shards can tell."""
    return (
        torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and not any(map(torch.is_autocast_enabled, kinds))
        and torch.get_default_device() == _CPU
    )
