"""Pipes among the ranks of a host, for barriers and small messages.

gloo would pass each message through four threads, on cores busy with shards. A pipe takes a
system call to write and two to wait and read, in the thread in need of the message.

A reader sees the end of a pipe as soon as the writing process has ended, however that happened.

Legend: n ranks; a rank has pipes to the ranks 1, 2, 4, ... < n places further on. After
log2(n) rounds every rank has the contribution of every rank (barrier: Hensgen, Finkel and Manber,
Two algorithms for barrier synchronization, 1988; gathering: Bruck and others, 1997).
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from msgspec import msgpack

from quorate.engines.collective import foreign_descriptors
from quorate.machine.limits import RANK_POLL_S

_HEAD = 8  # bytes: the length of a message, before the message
_CHUNK = 1 << 16  # bytes: the capacity of a pipe on Linux
_BUNDLES = msgpack.Decoder(list[bytes])


class HostPipes:
    """The pipes of this rank. Use the object in a single thread, and close the object.

    Every rank of every host constructs the object, because ``gather`` needs all ranks.

    Args:
        members: the ranks of this host, in ascending order.
        rank: the number of this rank.
        gather: returns the values that all ranks of all hosts pass, by rank. Blocks.
        look: called five times a second while this rank waits; raises if a rank is lost.
    """

    def __init__(
        self,
        members: Sequence[int],
        rank: int,
        gather: Callable[[Any], list[Any]],
        look: Callable[[], None],
    ) -> None:
        self._place, self._count, self._look = members.index(rank), len(members), look
        distances = [1 << n for n in range((self._count - 1).bit_length())]
        ends = {distance: os.pipe() for distance in distances}
        self._writes = {distance: write for distance, (_, write) in ends.items()}
        self._reads: dict[int, int] = {}
        try:
            offers = gather([foreign_descriptors.offer(read) for read, _ in ends.values()])
            for number, distance in enumerate(distances):
                offered = offers[members[(self._place - distance) % self._count]][number]
                fd = foreign_descriptors.opened(offered, os.O_RDONLY | os.O_NONBLOCK)
                if fd is not None:
                    self._reads[distance] = fd
            has_all = gather(len(self._reads) == len(distances))
        except BaseException:
            self.close()
            raise
        finally:
            for read, _ in ends.values():
                os.close(read)  # else the pipe would not end with the process that writes
        for write in self._writes.values():
            os.set_blocking(write, False)
        # False if ranks of this host cannot open each other's descriptors.
        self.are_complete = all(has_all[member] for member in members)

    def close(self) -> None:
        """Close the pipes. Waiting ranks raise ``ConnectionError``."""
        for fds in (self._writes, self._reads):
            while fds:
                os.close(fds.popitem()[1])

    def arrive(self) -> None:
        """Return when all ranks of this host have called this method. Blocks.

        Raises:
            ConnectionError: a rank has ended.
        """
        for distance in self._writes:
            self._swap(distance, b"")

    def gather(self, own: bytes) -> list[bytes]:
        """Return the messages that all ranks of this host pass, by rank. Blocks.

        Raises:
            ConnectionError: a rank has ended.
        """
        found = [own]  # of this rank, of the rank before this rank, ...
        for distance in self._writes:
            bundle = msgpack.encode(found[: self._count - distance])
            found += _BUNDLES.decode(self._swap(distance, bundle))
        return [found[(self._place - place) % self._count] for place in range(self._count)]

    def spread(self, own: bytes | None) -> bytes:
        """Return the message of the first rank of this host. Every rank of the host calls. Blocks.

        Args:
            own: the message, on the first rank; None on all others.

        Raises:
            ConnectionError: a rank has ended.
        """
        message, place = own or b"", self._place
        for distance in self._writes:
            if distance <= place < 2 * distance:
                message = self._swap(distance, None)
            elif place < distance and place + distance < self._count:
                self._swap(distance, message, receives=False)
        return message

    def _swap(self, distance: int, message: bytes | None, *, receives: bool = True) -> bytes:
        """Send a message some places on, while receiving from as many places before. Blocks.

        If every rank wrote first and read afterwards, all would wait as soon as pipes are full.

        Args:
            message: None: send nothing.
        """
        to, source = self._writes[distance], self._reads[distance]
        head = b"" if message is None else len(message).to_bytes(_HEAD, "little")
        left = memoryview(head + (message or b""))
        came, size = bytearray(), _HEAD if receives else 0
        while True:
            with suppress(BlockingIOError):
                while left:
                    left = left[os.write(to, left[:_CHUNK]) :]
            with suppress(BlockingIOError):
                # Read no more than one message: the next message may be in the pipe already.
                while len(came) < size:
                    part = os.read(source, size - len(came))
                    if not part:
                        raise ConnectionError("its pipe is closed")
                    came += part
                    if len(came) == size == _HEAD:
                        size += int.from_bytes(came, "little")
            if not left and len(came) == size:
                return bytes(came[_HEAD:])
            ready = select.poll()
            if left:
                ready.register(to, select.POLLOUT)
            if len(came) < size:
                ready.register(source, select.POLLIN)
            while not ready.poll(RANK_POLL_S * 1000):
                self._look()
