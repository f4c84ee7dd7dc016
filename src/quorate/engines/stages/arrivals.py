"""Arrivals: what came for one device of a replica, or for who has the replica, under keys."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable
from typing import Any, Protocol

from quorate.errors import SettingError

EXPECTED = "batches and values between stages that can be sent to another process"


class GoneError(Exception):
    """Who is at another end of a link is gone, or has closed it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"device {number} is gone")
        self.number = number


class Arrivals:
    """Values that came, until they are taken. Any thread puts; one thread takes."""

    def __init__(self) -> None:
        self._arrived: dict[Hashable, deque[Any]] = {}
        self._changed = threading.Condition()
        self._gone: deque[int] = deque()

    def put(self, key: Hashable, value: Any) -> None:
        """Put a value where ``take`` finds it."""
        with self._changed:
            self._arrived.setdefault(key, deque()).append(value)
            self._changed.notify_all()

    def take(self, *keys: Hashable) -> tuple[Hashable, Any]:
        """Return what came under one of some keys, with the key; the first of these. Blocks.

        Raises:
            GoneError: who is at another end is gone, and nothing of this is here.
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

    def lose(self, number: int) -> None:
        """Note that who is at another end is gone: what came before may still be taken."""
        with self._changed:
            self._gone.append(number)
            self._changed.notify_all()


class Ends(Protocol):
    """One device's ends of its links to the others and the parent, whatever they are made of."""

    def send(self, to: int, key: Hashable, value: Any) -> None:
        """Send a value. One to a device that is gone is lost."""

    def put(self, key: Hashable, value: Any) -> None:
        """Put a value where ``take`` finds it: one from this device to itself."""

    def take(self, *keys: Hashable) -> tuple[Hashable, Any]:
        """Return what came under one of some keys, with the key. Blocks."""

    def take_soon(
        self, *keys: Hashable, within_s: float | None = None
    ) -> tuple[Hashable, Any] | None:
        """Do as ``take``; return None if nothing comes for so long. None: wait for ever."""

    def close(self) -> None:
        """Close them: whoever takes, here or at the other ends, hears that they are gone."""
