"""Host pipes: the ranks of one host tell each other by them that they are there, and what is small.

By gloo each of that is a message between four threads of either rank, on cores that compute. Here
it is one call of the system to write and two to wait and read, in the thread that wants it.

A pipe has no name: its reader opens the pipe under /proc, as ``HostMemory`` does with memory. A
reader sees the end of the pipe as soon as the writing process has ended, however that came.

Legend: n ranks, each of which has a pipe to those that are 1, 2, 4, ... < n places further on. What
each of them has is everywhere after log2(n) rounds (Hensgen, Finkel and Manber, Two algorithms for
barrier synchronization, 1988; Bruck and others, 1997, for what is gathered).
"""

from __future__ import annotations

import os
import select
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from quorate.machine.limits import RANK_POLL_S

_HEAD = 8  # bytes: the length of what follows
_CHUNK = 1 << 16  # bytes that Linux's pipes hold

Gather = Callable[[Any], list[Any]]  # what each rank of all hosts has given, by rank


class HostPipes:
    """This rank's pipes to others of its host, and from them. For one thread. ``close`` them.

    Args:
        members: the ranks of this host.
        rank: this one.
        writes, reads: descriptors by distance, to who is so much further on, from who is before.
        limit_s: that the others may take.
        look: called while this rank waits: raises if it is in vain.
    """

    def __init__(
        self,
        members: Sequence[int],
        rank: int,
        writes: dict[int, int],
        reads: dict[int, int],
        limit_s: float,
        look: Callable[[], None],
    ) -> None:
        self._place, self._count = members.index(rank), len(members)
        self._writes, self._reads = writes, reads
        self._limit_s, self._look = limit_s, look
        for fd in (*writes.values(), *reads.values()):
            os.set_blocking(fd, False)

    def close(self) -> None:
        """Close them: whoever waits for this rank raises."""
        for fds in (self._writes, self._reads):
            while fds:
                os.close(fds.popitem()[1])

    def arrive(self) -> None:
        """Return when all have come here. Blocks.

        Raises:
            ConnectionError: a rank is gone.
            RuntimeError: it takes too long.
        """
        for distance in self._writes:
            self._swap(distance, b"")

    def gather(self, own: bytes) -> list[bytes]:
        """Return what each has given, in the order of ranks. All call it. Blocks.

        Raises:
            ConnectionError: a rank is gone.
            RuntimeError: it takes too long.
        """
        found = [own]  # of this place, the one before it, ...
        for distance in self._writes:
            wanted = found[: self._count - distance]
            parts = (
                part for each in wanted for part in (len(each).to_bytes(_HEAD, "little"), each)
            )
            found += _parted(self._swap(distance, b"".join(parts)))
        return [found[(self._place - place) % self._count] for place in range(self._count)]

    def spread(self, own: bytes | None) -> bytes:
        """Return what the first rank has given, who alone gives something. All call it. Blocks.

        It may take however long.

        Raises:
            ConnectionError: a rank is gone.
        """
        place = self._place
        for distance in self._writes:
            if distance <= place < 2 * distance:
                own = self._through(None, b"", self._reads[distance], for_ever=True)
            elif place < distance and place + distance < self._count:
                assert own is not None
                self._through(self._writes[distance], own, None, for_ever=True)
        assert own is not None
        return own

    def _swap(self, distance: int, text: bytes) -> bytes:
        return self._through(self._writes[distance], text, self._reads[distance])

    def _through(
        self, to: int | None, text: bytes, source: int | None, *, for_ever: bool = False
    ) -> bytes:
        """Write a message and read one, each if there is a pipe for it. Blocks.

        Both at once: where all wrote first, and nobody read, all would wait once pipes are full.
        """
        left = memoryview(len(text).to_bytes(_HEAD, "little") + text if to is not None else b"")
        came, size = bytearray(), _HEAD
        until = None if for_ever else time.monotonic() + self._limit_s
        with suppress(BlockingIOError):  # mostly it has room
            if to is not None:
                left = left[os.write(to, left[:_CHUNK]) :]
        while left or (source is not None and len(came) < size):
            self._wait(to if left else None, source if len(came) < size else None, until)
            with suppress(BlockingIOError):
                if left and to is not None:
                    left = left[os.write(to, left[:_CHUNK]) :]
            with suppress(BlockingIOError):
                # No more than this message: the next one may be there already.
                if source is not None and len(came) < size:
                    part = os.read(source, size - len(came))
                    if not part:
                        raise ConnectionError("its pipe is closed")
                    came += part
                    if len(came) == size == _HEAD:
                        size += int.from_bytes(came, "little")
        return bytes(came[_HEAD:])

    def _wait(self, to: int | None, source: int | None, until: float | None) -> None:
        waits = select.poll()
        if to is not None:
            waits.register(to, select.POLLOUT)
        if source is not None:
            waits.register(source, select.POLLIN)
        while not waits.poll(RANK_POLL_S * 1000):
            self._look()
            if until is not None and time.monotonic() > until:
                raise RuntimeError(f"nothing came in {self._limit_s:g} s")


def pipes(
    hosts: Sequence[Sequence[int]],
    rank: int,
    gather: Gather,
    limit_s: float,
    look: Callable[[], None],
) -> tuple[HostPipes | None, bool]:
    """Return the pipes of this rank's host, and whether every host has them. All ranks call it.

    None where it has no other rank, or they cannot open each other's: in another container, say.

    Args:
        hosts: the ranks of each.
        gather: by which ranks tell each other where their pipes are. Blocks.
        limit_s, look: see ``HostPipes``.
    """
    members = next(each for each in hosts if rank in each)
    place, count = members.index(rank), len(members)
    distances = [1 << n for n in range((count - 1).bit_length())]
    ends = {distance: os.pipe() for distance in distances}
    writes = {distance: write for distance, (_, write) in ends.items()}
    reads: dict[int, int] = {}
    try:
        own = {str(d): [read, *_identity(read)] for d, (read, _) in ends.items()}
        offers = gather([os.getpid(), own])
        for distance in distances:
            pid, offered = offers[members[(place - distance) % count]]
            fd = _opened(pid, *offered[str(distance)])
            if fd is not None:
                reads[distance] = fd
        have = gather(len(reads) == len(distances))
    except BaseException:
        for fd in (*writes.values(), *reads.values()):
            os.close(fd)
        raise
    finally:
        for read, _ in ends.values():
            os.close(read)  # the others have opened it, so that there is an end to it
    found = HostPipes(members, rank, writes, reads, limit_s, look)
    if count == 1 or not all(have[member] for member in members):
        found.close()
        return None, all(have)
    return found, all(have)


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _opened(pid: int, fd: int, *identity: int) -> int | None:
    """Return a pipe of another process, opened to be read; None if it cannot be had."""
    path = Path(f"/proc/{pid}/fd/{fd}")
    try:
        # Looked at before it is opened: what is read of another's is lost for that.
        found = path.stat()
        if not stat.S_ISFIFO(found.st_mode) or (found.st_dev, found.st_ino) != identity:
            return None
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    return opened


def _parted(text: bytes) -> list[Any]:
    found, at = [], 0
    while at < len(text):
        end = at + _HEAD + int.from_bytes(text[at : at + _HEAD], "little")
        found.append(text[at + _HEAD : end])
        at = end
    return found
