"""Links between the devices of a replica and their parent: values, sent under keys.

Between processes each pair has a socket for parcels (``data/parcel``): large tensors lie in memory
without a name, whose descriptor travels. Each process has a thread per socket to read all arrivals:
so two devices may send to each other at the same time, and a device computes while values are on
their way. The schedule bounds how much may wait.

Threads send each other copies. On the host values are copied: a stage may write in place to a value
that an earlier stage has saved for the backward pass. Between GPUs values are copied on two extra
streams, one at each end, so that no stage waits in the queue of another stage. An event marks the
arrival. Both streams note their use of the memory: without the note the allocator would hand out
the memory again. Strides stay the same: kernels, and so bits, may go by strides.
"""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from quorate.data.parcel import UnsentError, in_words, pack, unpack
from quorate.errors import SettingError
from quorate.machine.devices import has_streams
from quorate.replica.compute_thread import CPU
from quorate.replica.nested import leaves, mapped_leaves, tensors
from quorate.replica.transfer import copied, with_strides


class ValueInTransit(NamedTuple):
    """A value on its way to a GPU."""

    value: Any
    arrived: Any  # the event


class DeviceCopier:
    """Copies values for a thread on a device.

    Args:
        device: of the receiving thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sides: dict[torch.device, torch.Stream] = {}  # of the ends

    def over(self, value: Any) -> Any:
        """Return a copy on the way; ``received`` returns the copy in the receiving thread."""
        source = next((t.device for t in tensors(value) if has_streams(t.device)), None)
        if source is None or not has_streams(self._device):
            return mapped_leaves(value, self._copied)
        return self._between_gpus(value, source)

    def _copied(self, leaf: Any) -> Any:
        # A tensor of the host goes to a GPU when it is wanted there, and not before.
        if not isinstance(leaf, torch.Tensor) or leaf.device in (CPU, self._device):
            return copied(leaf)
        return with_strides(leaf, lambda tensor: tensor.to(self._device))

    def _between_gpus(self, value: Any, source: torch.device) -> ValueInTransit:
        begin, end = self._side(source), self._side(self._device)
        begin.wait_event(torch.accelerator.current_stream(source).record_event())

        def moved(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.device != source:
                return copied(leaf)
            leaf.record_stream(begin)
            return with_strides(leaf, lambda t: t.to(self._device, non_blocking=True, copy=True))

        with end, begin:
            there = mapped_leaves(value, moved)
            if end is not begin:  # what torch has it wait for, if devices have no way of their own
                end.wait_event(begin.record_event())
            return ValueInTransit(there, end.record_event())

    def _side(self, device: torch.device) -> torch.Stream:
        if device not in self._sides:
            self._sides[device] = torch.Stream(device)
        return self._sides[device]


def received(value: Any) -> Any:
    """Return a copy that has arrived, for the calling thread's current streams."""
    if not isinstance(value, ValueInTransit):
        return value
    for leaf in leaves(value.value):
        if isinstance(leaf, torch.Tensor) and has_streams(leaf.device):
            current = torch.accelerator.current_stream(leaf.device)
            current.wait_event(value.arrived)
            leaf.record_stream(current)
    return value.value


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
