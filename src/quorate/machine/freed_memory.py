"""Freed memory: a process that computes shards keeps freed memory, to use the memory again.

By default glibc returns large blocks to the system when they are freed: activations and gradients,
in every shard. Each page of the next blocks is then a page fault, and is zeroed: a tenth of the
time of a convolutional network's shard, a fifth if its activations are large. All threads but the
main thread suffer most: their arenas hold no block of more than 32 MB (``mallopt(3)``, glibc's
malloc/arena.c).
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

from quorate.machine.environment import has_malloc_settings

# mallopt's parameters, from malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_NEVER = -1
_HEAP_BYTES = 64 << 20  # a thread's arena: an empty arena is returned unless the pad is as large


def keep_freed_memory() -> None:
    """Make this process keep and reuse freed memory from now on. Call before threads are started.

    The process keeps its peak memory until ``return_freed_memory``. Does nothing if the C library
    is not glibc, or if the environment configures the allocation.
    """
    if sys.platform != "linux" or has_malloc_settings():
        return
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_MAX, 0)  # a separately mapped block would be unmapped when freed
        mallopt(_TRIM_THRESHOLD, _NEVER)
        mallopt(_TOP_PAD, _HEAP_BYTES)
        mallopt(_ARENA_MAX, 1)  # for later threads: large blocks come from the main heap


def return_freed_memory() -> None:
    """Return the memory that is free now to the system."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
