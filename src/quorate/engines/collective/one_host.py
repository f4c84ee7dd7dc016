"""The ranks of one host: pipes for barriers and small messages, and shared memory.

Descriptors are opened under /proc. Memory and pipes shared in this way have no name: a kill leaves
no name behind, and processes of further users cannot open them.

gloo would pass each message through four threads, on cores busy with shards. A pipe takes a
system call to write and two to wait and read, in the thread in need of the message. A reader sees
the end of a pipe as soon as the writing process has ended, however that happened.

Legend: n ranks; a rank has pipes to the ranks 1, 2, 4, ... < n places further on. After
log2(n) rounds every rank has the contribution of every rank (barrier: Hensgen, Finkel and Manber,
Two algorithms for barrier synchronization, 1988; gathering: Bruck and others, 1997).
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import msgpack

from quorate.errors import UserError
from quorate.machine.limits import RANK_POLL_S
from quorate.machine.shared_memory import Segment
from quorate.replica.flat import Flat

if TYPE_CHECKING:
    from quorate.engines.collective.rank_control import RankControl

Offer = list[int]  # process, descriptor, device and inode of a file: plain numbers, for messages


def offer(fd: int) -> Offer:
    """Return the description of a descriptor, for ``opened`` in another process."""
    file = os.fstat(fd)
    return [os.getpid(), fd, file.st_dev, file.st_ino]


def opened(offered: Offer, flags: int) -> int | None:
    """Open the file of another process's descriptor; return None on failure.

    Processes of another container or another user cannot be opened.
    """
    pid, fd, *identity = offered
    path = Path(f"/proc/{pid}/fd/{fd}")
    try:
        # Compare before opening: to open and close a foreign pipe would end the pipe for others.
        file = path.stat()
        if [file.st_dev, file.st_ino] == identity:
            return os.open(path, flags | os.O_CLOEXEC)
    except OSError:
        pass
    return None


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
            offers = gather([offer(read) for read, _ in ends.values()])
            for number, distance in enumerate(distances):
                offered = offers[members[(self._place - distance) % self._count]][number]
                fd = opened(offered, os.O_RDONLY | os.O_NONBLOCK)
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
        return self.gather(own or b"")[0]

    def _swap(self, distance: int, message: bytes) -> bytes:
        """Send a message some places on, while receiving from as many places before. Blocks.

        If every rank wrote first and read afterwards, all would wait as soon as pipes are full.
        """
        to, source = self._writes[distance], self._reads[distance]
        left = memoryview(len(message).to_bytes(_HEAD, "little") + message)
        came, size = bytearray(), _HEAD
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


GRADIENTS, PARAMETERS = 0, 1  # vectors that ranks of a host read from each other


class HostMemory:
    """Vectors of the ranks of this host. All ranks of all hosts construct the object. Blocks.

    Args:
        own: vectors of this rank, for all ranks of the host to read: gradients, and parameters with
            the same values on all ranks. All vectors have the same layout.
        by_owners: whether the owners of slices alone write parameters. If ranks of this host share
            memory, all of them use the parameters of the first rank from now on.
    """

    def __init__(self, ranks: RankControl, own: Sequence[Flat], *, by_owners: bool) -> None:
        self._rank, self._own = ranks.rank, own
        segments = [flat.segment for flat in own if flat.segment is not None]
        can_share = len(segments) == len(own) and ranks.device.type == "cpu" and ranks.has_pipes
        offered = [offer(segment.fd) for segment in segments]
        offers = ranks.gather(offered if can_share else None)
        self.host = ranks.hosts.of[ranks.rank]
        self.ranks = ranks.hosts.ranks[self.host]
        mapped = {rank: _mapped(offers[rank], own) for rank in self.ranks if rank != ranks.rank}
        self._mapped = {rank: flats for rank, flats in mapped.items() if flats is not None}
        agreed = ranks.gather([can_share and len(self._mapped) == len(mapped), by_owners])
        # False: ranks of this host send each other what would be read.
        self.shares = all(agreed[rank][0] for rank in self.ranks)
        # Whether parameters exist once on this host.
        self.has_one_copy = self.shares and all(agreed[rank][1] for rank in self.ranks)
        if self.has_one_copy:
            self._make_one(own[PARAMETERS])
        # By rank of this host: the ranks whose slices the rank receives or sends; the rank itself,
        # and ranks of other hosts.
        self.targets = {
            rank: [r for r in range(ranks.size) if ranks.hosts.hand(self.host, r) == rank]
            for rank in self.ranks
        }

    def _make_one(self, own: Flat) -> None:
        """Map the parameters of this host's first rank at the addresses of this rank's."""
        if (lead := self._mapped.get(self.ranks[0])) is not None:
            mine, theirs = own.segment, lead[PARAMETERS].segment
            assert mine is not None
            assert theirs is not None
            mine.become(theirs)
        for flats in self._mapped.values():
            flats[PARAMETERS] = own  # the parameters of other ranks are gone

    def of(self, rank: int, which: int) -> Flat:
        """Return the vectors ``own[which]`` of a rank of this host."""
        return self._own[which] if rank == self._rank else self._mapped[rank][which]


def _mapped(offers: list[Any] | None, like: Sequence[Flat]) -> list[Flat] | None:
    """Return the vectors offered by a rank of this host; None if they cannot be mapped."""
    if offers is None:
        return None
    found: list[Flat] = []
    for offered, flat in zip(offers, like, strict=True):
        fd = opened(offered, os.O_RDWR)
        if fd is None:
            return None
        try:
            found.append(flat.layout.over(Segment(max(1, flat.layout.nbytes), fd)))
        except (UserError, ValueError):  # smaller than expected
            return None
    return found
