"""Links between the devices of a replica and their parent: values, sent under keys.

Threads send each other copies. Between processes each pair has a socket for parcels
(``data/parcel``): large tensors lie in memory without a name, whose descriptor travels. Each
process has a thread per socket to read all arrivals: so two devices may send to each other at the
same time, and a device computes while values are on their way. The schedule bounds how
much may wait.
"""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from typing import Any

import torch

from quorate.data.parcel import UnsentError, in_words, pack, unpack
from quorate.engines.stages.device_copier import DeviceCopier, received
from quorate.errors import SettingError

PARENT = -1  # the number of the process or thread with the replica, among those of devices
EXPECTED = "batches and values between stages that can be sent to another process"


class GoneError(Exception):
    """A device is gone, or has closed the link."""

    def __init__(self, number: int) -> None:
        super().__init__(f"device {number} is gone")
        self.number = number


class StageLinks(ABC):
    """The links of a device, or of the parent, and arrived values by key.

    Any thread puts. A single thread sends and takes.
    """

    def __init__(self) -> None:
        self._arrived: dict[Hashable, deque[Any]] = {}
        self._changed = threading.Condition()
        self._gone: deque[int] = deque()

    @abstractmethod
    def send(self, to: int, key: Hashable, value: Any) -> None:
        """Send a value; without a receiver the value is lost."""

    @abstractmethod
    def close(self) -> None:
        """Close the links: ``take`` raises, here and at the far ends."""

    def put(self, key: Hashable, value: Any) -> None:
        """Add a value."""
        with self._changed:
            self._arrived.setdefault(key, deque()).append(value)
            self._changed.notify_all()

    def take(self, *keys: Hashable, within_s: float | None = None) -> tuple[Hashable, Any]:
        """Return the first value of some keys, with the key. Blocks.

        Raises:
            GoneError: a device is gone, and no value has arrived.
            SettingError: a value cannot be sent.
            TimeoutError: nothing at all arrives for ``within_s`` seconds.
        """
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
                    raise TimeoutError

    def lose(self, number: int) -> None:
        """Note that a device is gone: values that have arrived may still be taken."""
        with self._changed:
            self._gone.append(number)
            self._changed.notify_all()


class SocketLinks(StageLinks):
    """The sockets of a process, by the number of the process at the far end.

    ``take`` notices closed sockets.
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
                self.put(*unpack(end))
        except (OSError, EOFError):
            pass  # the far end is closed
        except UnsentError as error:
            self.put("problem", str(error))
        except Exception as error:  # the edge of a thread
            self.put("problem", in_words(error))
        finally:
            self.lose(number)


class QueueLinks(StageLinks):
    """The links of a thread to the threads of the process.

    Args:
        devices: of all threads, by number.
        ends: the links of all threads, by number.
    """

    def __init__(self, devices: Mapping[int, torch.device], ends: Mapping[int, QueueLinks]) -> None:
        super().__init__()
        self._ends = ends
        self._copiers = {number: DeviceCopier(device) for number, device in devices.items()}

    @classmethod
    def between(cls, devices: Mapping[int, torch.device]) -> dict[int, QueueLinks]:
        """Return the links of each thread, for threads on some devices, by number."""
        links: dict[int, QueueLinks] = {}
        links |= {number: cls(devices, links) for number in devices}
        return links

    def send(self, to: int, key: Hashable, value: Any) -> None:
        """Send a copy of a value, on the device of the receiver."""
        self._ends[to].put(key, self._copiers[to].over(value))

    def take(self, *keys: Hashable, within_s: float | None = None) -> tuple[Hashable, Any]:
        """Do as ``StageLinks.take``, and have the thread's streams wait for the copy."""
        key, value = super().take(*keys, within_s=within_s)
        return key, received(value)

    def close(self) -> None:
        """Close the links: ``take`` raises, here and at the far ends."""
        for end in self._ends.values():
            end.lose(PARENT)


def serve_parent(
    links: StageLinks,
    key: Hashable,
    carry_out: Callable[[Any], None],
    describe: Callable[[BaseException], Any],
) -> None:
    """Carry out the orders of the parent, until the parent closes the links.

    Args:
        key: of orders.
        carry_out: called with each order.
        describe: returns the value to send under "failed" for an exception of ``carry_out``.
    """
    try:
        while True:
            carry_out(links.take(key)[1])
    except GoneError:
        return  # the parent decides
    except BaseException as error:  # the edge of the process, or of the thread
        links.send(PARENT, "failed", describe(error))
        with suppress(GoneError):
            links.take("end")
