"""Freed memory: a process that computes shards keeps it, as it wants the same again at once.

glibc gives large blocks back to the system when they are freed: activations and gradients, in every
shard. Then each page of the next ones is a fault, and is zeroed: a tenth of the time of a
convolutional network's shard, a fifth where its activations are large. Threads other than the main
one suffer most: their arenas hold no block of more than 32 MB (``mallopt(3)``, glibc's
malloc/arena.c).
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

from quorate.machine.environment import has_malloc_settings

# mallopt's parameters, of malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_NEVER = -1
_HEAP_BYTES = 64 << 20  # of a thread's arena: one that is empty goes unless the pad is as large


def keep_freed_memory() -> None:
    """Have this process use freed memory again, from now on. Before threads are started.

    It holds as much as it once needed until ``return_freed_memory``. Nothing happens with another C
    library than glibc, or where the environment says how it allocates.
    """
    if sys.platform != "linux" or has_malloc_settings():
        return
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_MAX, 0)  # a block that is mapped alone is unmapped when it is freed
        mallopt(_TRIM_THRESHOLD, _NEVER)
        mallopt(_TOP_PAD, _HEAP_BYTES)
        mallopt(_ARENA_MAX, 1)  # for threads to come: they take large blocks from the main heap


def return_freed_memory() -> None:
    """Give the system what is free now."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
