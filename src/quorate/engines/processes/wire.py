"""The wire between the coordinator and one worker: small messages over a pair of sockets.

What is large lies in shared memory, whose descriptors travel with a message. A message: its length
in 4 bytes, then what ``messages.pack`` makes of it.

Why not records in shared memory, and a descriptor to wake who waits: it is faster by some 5 us of
the 15 that a word and its answer take, and the order beside messages that stay on the sockets, one
that is killed while it writes, and one that sleeps are then ours to see to, not the kernel's.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from selectors import EVENT_READ, EVENT_WRITE, BaseSelector

from quorate.engines.messages import Message, pack, unpack
from quorate.machine.descriptors import receive_descriptors
from quorate.machine.shared_memory import Segment

_HEADER = struct.Struct("<I")
_CHUNK = 1 << 16
_MOST_FDS = 8  # that come with one message
# Else a script that has SIGPIPE's default action back ends when the other end has.
_NO_SIGNAL = int(getattr(socket, "MSG_NOSIGNAL", 0))
# As plain numbers: two flags of an enumeration are put together in microseconds.
_AT_ONCE = int(socket.MSG_DONTWAIT)


class Wire:
    """One end of a wire. The receiver of descriptors owns them. Not thread-safe.

    Receiving raises ``UserError`` where descriptors were sent that this process cannot take.
    """

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.fds: list[int] = []  # received, and not yet taken
        self.is_cut = False  # nothing more will come: the other end is closed
        self._received = bytearray()
        self._outbox: deque[_Unsent] = deque()
        self._selector: BaseSelector | None = None
        self._awaits_room = False  # whether the selector waits for room in the socket

    @classmethod
    def pair(cls) -> tuple[Wire, Wire]:
        """Return the two ends of a new wire."""
        ours, theirs = socket.socketpair()
        return cls(ours), cls(theirs)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message. It blocks if the other end has left some 100 kB unread.

        A message to a process that is gone is lost without an error: its end is seen elsewhere.
        """
        data = _framed(message)
        try:
            if fds:
                data = data[self._sent(data, fds, 0) :]
            self.socket.sendall(data, _NO_SIGNAL)
        except (BrokenPipeError, ConnectionResetError):
            pass  # and what it sent before is still to be read

    def post(self, message: Message, *fds: int) -> None:
        """Send a message, or as much of it as the other end takes now. Does not block.

        The other end may be a process that is stopped. What it does not take waits, with copies of
        the descriptors, for ``flush`` or ``withdraw``. Do not mix with ``send``.
        """
        data, sent = _framed(message), 0
        if not self._outbox:
            try:
                sent = self._sent(data, fds, _AT_ONCE)
            except BlockingIOError:
                pass
            except (BrokenPipeError, ConnectionResetError):
                return  # nobody will read it
        if sent < len(data):  # descriptors go with the first byte
            rest, copies = bytearray(data[sent:]), [] if sent else [os.dup(fd) for fd in fds]
            self._outbox.append(_Unsent(message, rest, copies, sent > 0))
            self.flush()

    def flush(self) -> None:
        """Send posted messages, as far as the other end takes them. Does not block."""
        while self._outbox:
            first = self._outbox[0]
            try:
                sent = self._sent(first.data, first.fds, _AT_ONCE)
            except BlockingIOError:
                break
            except (BrokenPipeError, ConnectionResetError):
                self._forget_outbox()  # nobody will read it
                break
            first.close()  # descriptors go with the first byte
            del first.data[:sent]
            first.is_begun = True
            if not first.data:
                self._outbox.popleft()
        if self._selector is not None and self.has_unsent is not self._awaits_room:
            self._awaits_room = self.has_unsent
            events = EVENT_READ | (EVENT_WRITE if self._awaits_room else 0)
            key = self._selector.get_key(self.socket)
            self._selector.modify(self.socket, events, key.data)

    def watch(self, selector: BaseSelector, hear: Callable[[], None]) -> None:
        """Have a selector call ``hear`` for received bytes, and for room if messages wait."""
        self._selector, self._awaits_room = selector, False
        selector.register(self.socket, EVENT_READ, hear)
        self.flush()

    def deaf(self) -> None:
        """End ``watch``, if the socket is watched."""
        selector, self._selector = self._selector, None
        if selector is not None:
            with suppress(KeyError):
                selector.unregister(self.socket)

    @property
    def has_unsent(self) -> bool:
        """Whether something that was posted waits until the other end takes it."""
        return bool(self._outbox)

    def withdraw(self, **fields: object) -> bool:
        """Take back the message with these fields, if nothing of it was sent; return whether."""
        for unsent in self._outbox:
            if not unsent.is_begun and fields.items() <= unsent.message.items():
                self._outbox.remove(unsent)
                unsent.close()
                return True
        return False

    def receive(self) -> Message | None:
        """Return the next message, or None when the other end is closed. Blocks."""
        while (message := self._take()) is None and not self.is_cut:
            self._read(0)
        return message

    def arrived(self) -> list[Message]:
        """Return all messages that are here. Does not block.

        Memory that came with one is in its place under "memory", and is closed with it.
        """
        while not self.is_cut:
            try:
                self._read(_AT_ONCE)
            except BlockingIOError:
                break
        messages = []
        while (message := self._take()) is not None:
            if "memory" in message:
                fd = self.fds.pop(0)
                message["memory"] = Segment(os.fstat(fd).st_size, fd)
            messages.append(message)
        return messages

    def close(self) -> None:
        """Close this end; the other one is cut when it has read what was sent."""
        self.deaf()
        self._forget_outbox()
        self.socket.close()

    def _sent(self, data: bytes | bytearray, fds: Sequence[int], flags: int) -> int:
        """Send the beginning of what there is, and descriptors with it; return how much."""
        if not fds:
            return self.socket.send(data, flags | _NO_SIGNAL)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        return self.socket.sendmsg([data], rights, flags | _NO_SIGNAL)

    def _forget_outbox(self) -> None:
        while self._outbox:
            self._outbox.popleft().close()

    def _read(self, flags: int) -> None:
        try:
            data, fds = receive_descriptors(self.socket, _CHUNK, _MOST_FDS, flags)
        except ConnectionResetError:
            data, fds = b"", []
        self.fds += fds
        self._received += data
        self.is_cut = not data

    def _take(self) -> Message | None:
        if len(self._received) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._received)
        end = _HEADER.size + length
        if len(self._received) < end:
            return None
        payload = bytes(self._received[_HEADER.size : end])
        del self._received[:end]
        message: Message = unpack(payload)
        return message


@dataclass(eq=False)
class _Unsent:
    """The unsent rest of a posted message, with descriptors of its own."""

    message: Message
    data: bytearray
    fds: list[int]
    is_begun: bool

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


def _framed(message: Message) -> bytes:
    payload = pack(message)
    return _HEADER.pack(len(payload)) + payload
