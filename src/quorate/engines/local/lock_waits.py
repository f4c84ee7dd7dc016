"""Short waits for the interpreter's lock while towers compute.

Towers compute in parallel, because torch's operations release the lock. But a thread that releases
the lock often takes the lock again before another thread is awake: Python hands the lock over only
after five milliseconds of waiting (``sys.getswitchinterval``). With shards of two milliseconds, two
towers then computed in turn, and the coordinator received the result of a shard with the end of the
next shard, so that shards were computed twice.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

WAIT_S = 2e-4  # a shorter wait costs more for switches than the wait saves

_lock = threading.Lock()
_users = 0
_before_s = _ours_s = 0.0  # as returned by the interpreter, which keeps whole microseconds


@contextmanager
def short_waits() -> Iterator[None]:
    """Within the block no thread waits longer than ``WAIT_S``, nor longer than the script has set.

    After the block waits are as before, unless the script has set a wait since, or further blocks
    go on.
    """
    global _users, _before_s, _ours_s
    with _lock:
        if not _users:
            _before_s = sys.getswitchinterval()
            sys.setswitchinterval(min(_before_s, WAIT_S))
            _ours_s = sys.getswitchinterval()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users and sys.getswitchinterval() == _ours_s:
                sys.setswitchinterval(_before_s)
