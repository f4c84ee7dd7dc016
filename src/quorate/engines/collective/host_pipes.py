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

from quorate.engines.collective import foreign_descriptors
from quorate.machine.limits import RANK_POLL_S

_HEAD = 8  # bytes: the length of a message, before the message
_CHUNK = 1 << 16  # bytes: the capacity of a pipe on Linux


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
            offers = gather([foreign_descriptors.offer(ends[each][0]) for each in distances])
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
        for distance, to in self._writes.items():
            self._swap(to, b"", self._reads[distance])

    def gather(self, own: bytes) -> list[bytes]:
        """Return the messages that all ranks of this host pass, by rank. Blocks.

        Raises:
            ConnectionError: a rank has ended.
        """
        found = [own]  # of this rank, of the rank before this rank, ...
        for distance, to in self._writes.items():
            wanted = found[: self._count - distance]
            packed = b"".join(len(each).to_bytes(_HEAD, "little") + each for each in wanted)
            found += _split(self._swap(to, packed, self._reads[distance]))
        return [found[(self._place - place) % self._count] for place in range(self._count)]

    def spread(self, own: bytes | None) -> bytes:
        """Return the message of the first rank of this host. Every rank of the host calls. Blocks.

        Args:
            own: the message, on the first rank; None on all others.

        Raises:
            ConnectionError: a rank has ended.
        """
        message, place = own or b"", self._place
        for distance, to in self._writes.items():
            if distance <= place < 2 * distance:
                message = self._swap(None, b"", self._reads[distance])
            elif place < distance and place + distance < self._count:
                self._swap(to, message, None)
        return message

    def _swap(self, to: int | None, message: bytes, source: int | None) -> bytes:
        """Write a message to a pipe while reading a message from another. Blocks.

        If every rank wrote first and read afterwards, all would wait as soon as pipes are full.
        """
        left = memoryview(b"" if to is None else len(message).to_bytes(_HEAD, "little") + message)
        came, size = bytearray(), 0 if source is None else _HEAD
        while True:
            with suppress(BlockingIOError):
                while to is not None and left:
                    left = left[os.write(to, left[:_CHUNK]) :]
            with suppress(BlockingIOError):
                # Read no more than one message: the next message may be in the pipe already.
                while source is not None and len(came) < size:
                    part = os.read(source, size - len(came))
                    if not part:
                        raise ConnectionError("its pipe is closed")
                    came += part
                    if len(came) == size == _HEAD:
                        size += int.from_bytes(came, "little")
            if not left and len(came) == size:
                return bytes(came[_HEAD:])
            ready = select.poll()
            if to is not None and left:
                ready.register(to, select.POLLOUT)
            if source is not None and len(came) < size:
                ready.register(source, select.POLLIN)
            while not ready.poll(RANK_POLL_S * 1000):
                self._look()


def _split(packed: bytes) -> list[bytes]:
    """Return the messages of a concatenation, in which each message has a head."""
    found, at = [], 0
    while at < len(packed):
        end = at + _HEAD + int.from_bytes(packed[at : at + _HEAD], "little")
        found.append(packed[at + _HEAD : end])
        at = end
    return found
