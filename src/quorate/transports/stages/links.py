"""Links: what the processes of a replica send each other, over a socket for each pair of them.

A link carries parcels (``data/parcel``): what is large lies in memory without a name, whose
descriptor travels. Each process has a thread per link that reads whatever comes: so a sender is
never held up by one that sends to it meanwhile, and a device computes while values are on their
way. How much may wait is bounded by the schedule, not by the link.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Hashable, Mapping
from contextlib import suppress
from typing import Any

from quorate.data.parcel import pack, unpack
from quorate.errors import SettingError

EXPECTED = "batches and values between stages that can be sent to another process"


class GoneError(Exception):
    """A process is gone, or its end is closed."""

    def __init__(self, number: int) -> None:
        super().__init__(f"the process of device {number} is gone")
        self.number = number


class Links:
    """One process's ends, by the number of the process at the other end.

    One thread sends; one thread receives. Closed ends of others are found when something is
    received.
    """

    def __init__(self, ends: Mapping[int, socket.socket]) -> None:
        self._ends = dict(ends)
        self._arrived: dict[Hashable, deque[Any]] = {}
        self._changed = threading.Condition()
        self._gone: deque[int] = deque()
        self._readers = [
            threading.Thread(
                target=self._read, args=(number, end), name=f"quorate-link-{number}", daemon=True
            )
            for number, end in self._ends.items()
        ]
        for reader in self._readers:
            reader.start()

    def send(self, to: int, key: Hashable, value: Any) -> None:
        """Send a value. Blocks until it is on its way; one to a process that is gone is lost.

        Raises:
            TypeError: it cannot be sent.
        """
        with suppress(OSError):
            pack(self._ends[to], (key, value))

    def put(self, key: Hashable, value: Any) -> None:
        """Put a value where ``take`` finds it: one from this process to itself."""
        with self._changed:
            self._arrived.setdefault(key, deque()).append(value)
            self._changed.notify_all()

    def take(self, *keys: Hashable) -> tuple[Hashable, Any]:
        """Return what came under one of some keys, with the key; the first of these. Blocks.

        Raises:
            GoneError: a process at another end is gone, and nothing of this is here.
        """
        taken = self.take_soon(*keys)
        assert taken is not None
        return taken

    def take_soon(
        self, *keys: Hashable, within_s: float | None = None
    ) -> tuple[Hashable, Any] | None:
        """Do as ``take``; return None if nothing comes for so long. None: wait for ever."""
        with self._changed:
            while True:
                for key in ("problem", *keys):
                    if waiting := self._arrived.get(key):
                        value = waiting.popleft()
                        if not waiting:
                            del self._arrived[key]
                        if key == "problem":
                            raise SettingError("split", value, EXPECTED, "make it of tensors")
                        return key, value
                if self._gone:
                    raise GoneError(self._gone[0])
                if not self._changed.wait(within_s):
                    return None

    def close(self) -> None:
        """Close all ends; threads that read end by it."""
        for end in self._ends.values():
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for reader in self._readers:
            reader.join()
        for end in self._ends.values():
            end.close()

    def _read(self, number: int, end: socket.socket) -> None:
        with suppress(OSError, EOFError):
            while True:
                sent, problem = unpack(end)
                if problem is not None:
                    self.put("problem", problem)
                else:
                    self.put(*sent)
        with self._changed:
            self._gone.append(number)
            self._changed.notify_all()
