"""Links: values that the devices of a replica and their parent send each other, under keys.

Between processes each pair has a socket that carries parcels (``data/parcel``): large tensors lie
in memory without a name, whose descriptor travels. Each process has a thread per link that reads
all that arrives: so a sender is never held up by a device that is sending too, and a device
computes while values are on their way. The schedule bounds how much may wait.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Hashable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from quorate.data.parcel import pack, unpack
from quorate.errors import SettingError

EXPECTED = "batches and values between stages that can be sent to another process"


class GoneError(Exception):
    """A device is gone, or has closed the link."""

    def __init__(self, number: int) -> None:
        super().__init__(f"device {number} is gone")
        self.number = number


class Arrivals:
    """Values that have arrived, by key. Any thread puts; a single thread takes."""

    def __init__(self) -> None:
        self._arrived: dict[Hashable, deque[Any]] = {}
        self._changed = threading.Condition()
        self._gone: deque[int] = deque()

    def put(self, key: Hashable, value: Any) -> None:
        """Add a value."""
        with self._changed:
            self._arrived.setdefault(key, deque()).append(value)
            self._changed.notify_all()

    def take(self, *keys: Hashable) -> tuple[Hashable, Any]:
        """Return the first value of some keys, with the key. Blocks.

        Raises:
            GoneError: a device is gone, and no value has arrived.
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
        """Note that a device is gone: values that have arrived may still be taken."""
        with self._changed:
            self._gone.append(number)
            self._changed.notify_all()


class StageLinks(Protocol):
    """The ends of a device's links to the parent and all devices."""

    def send(self, to: int, key: Hashable, value: Any) -> None:
        """Send a value; without a receiver the value is lost."""

    def put(self, key: Hashable, value: Any) -> None:
        """Add a value from this device to itself."""

    def take(self, *keys: Hashable) -> tuple[Hashable, Any]:
        """Return the first value of some keys, with the key. Blocks."""

    def take_soon(
        self, *keys: Hashable, within_s: float | None = None
    ) -> tuple[Hashable, Any] | None:
        """Do as ``take``; return None if nothing comes for so long. None: wait for ever."""

    def close(self) -> None:
        """Close the ends: ``take`` raises, here and in all devices."""


class SocketLinks(Arrivals):
    """The sockets of a process, by the number of the process at the far end.

    A single thread sends, a single thread receives. ``take`` notices closed sockets.
    """

    def __init__(self, ends: Mapping[int, socket.socket]) -> None:
        super().__init__()
        self._ends = dict(ends)
        self._readers: list[threading.Thread] = []
        try:
            for number, end in self._ends.items():
                name = f"quorate-link-{number}"
                reader = threading.Thread(
                    target=self._read, args=(number, end), name=name, daemon=True
                )
                reader.start()
                self._readers.append(reader)
        except BaseException:  # there is no room for a thread
            self.close()
            raise

    def send(self, to: int, key: Hashable, value: Any) -> None:
        """Send a value; without a receiver the value is lost. Blocks until the value is written.

        Raises:
            TypeError: the value cannot be sent.
        """
        with suppress(OSError):
            pack(self._ends[to], (key, value))

    def close(self) -> None:
        """Close all sockets, and end the reading threads."""
        for end in self._ends.values():
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for reader in self._readers:
            reader.join()
        for end in self._ends.values():
            end.close()

    def _read(self, number: int, end: socket.socket) -> None:
        try:
            while True:
                sent, problem = unpack(end)
                if problem is not None:
                    self.put("problem", problem)
                    return
                self.put(*sent)
        except (OSError, EOFError):
            pass  # the other end is closed
        except Exception as error:  # the edge of a thread
            text = str(error).partition("\n")[0][:200]
            self.put("problem", f"{type(error).__name__}: {text}")
        finally:
            self.lose(number)
