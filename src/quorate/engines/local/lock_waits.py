"""How long threads wait for the interpreter's lock before it is handed to them: towers, not long.

Towers compute side by side as torch's operations let the lock go. But whoever let it go may have it
back before another thread is awake, again and again: only after five milliseconds of waiting
(``sys.getswitchinterval``) is a thread handed the lock. Two towers whose shards take two
milliseconds so computed one after the other, and the coordinator heard of a shard when the next one
was done, and had it computed twice.
"""

from __future__ import annotations

import sys
import threading

WAIT_S = 2e-4  # with less a switch takes as long as what is won

_lock = threading.Lock()
_users = 0
_before_s = _ours_s = 0.0  # as the interpreter tells them: it keeps whole microseconds


class ShortWaits:
    """Between ``begin`` and ``end`` of one of these nobody waits longer than ``WAIT_S``."""

    def __init__(self) -> None:
        self._has_begun = False

    def begin(self) -> None:
        """Have threads wait less; where a script set less than that, it stays."""
        global _users, _before_s, _ours_s
        with _lock:
            if self._has_begun:
                return
            self._has_begun = True
            if not _users:
                _before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(_before_s, WAIT_S))
                _ours_s = sys.getswitchinterval()
            _users += 1

    def end(self) -> None:
        """Have them wait as before, if nobody else wants less; what a script has set since stays.

        Nothing happens where it has not begun.
        """
        global _users
        with _lock:
            if not self._has_begun:
                return
            self._has_begun = False
            _users -= 1
            if not _users and sys.getswitchinterval() == _ours_s:
                sys.setswitchinterval(_before_s)
