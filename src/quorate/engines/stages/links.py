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


class Links(Arrivals):
    """One process's ends, by the number of the process at the other end.

    One thread sends; one thread receives. Closed ends of others are found when something is
    received.
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
        """Send a value. Blocks until it is on its way; one to a process that is gone is lost.

        Raises:
            TypeError: it cannot be sent.
        """
        with suppress(OSError):
            pack(self._ends[to], (key, value))

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
