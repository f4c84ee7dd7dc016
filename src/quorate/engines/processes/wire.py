"""The wire between the coordinator and a worker: small messages over a pair of sockets.

Large things lie in shared memory, whose descriptors travel with a message. A message on the socket
is its length in 4 bytes, and the bytes from ``messages.pack``. See ``worker_messages``.

Records in shared memory, with a descriptor to wake the reader, would save some 5 us of the 15 us of
a message and its answer. But the kernel would then no longer order messages, end the message of a
killed writer, and wake a sleeping reader.

An alarm ends the wait of a selector, from any thread or signal handler.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from selectors import EVENT_READ, EVENT_WRITE, BaseSelector

from quorate.engines.messages import pack
from quorate.engines.processes.worker_messages import READER, ShardsDone, WorkerMessage
from quorate.machine.descriptors import receive_descriptors
from quorate.machine.shared_memory import Segment


class Alarm:
    """A pipe watched by a selector. ``close`` the alarm after use.

    Args:
        selector: the owner of the selector calls the data of ready keys.
    """

    def __init__(self, selector: BaseSelector) -> None:
        self._selector = selector
        # Held while a descriptor is in use: after a close, the number may belong to another file. A
        # signal handler may ring in the middle of a call of the same thread.
        self._lock = threading.RLock()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        selector.register(self._read, EVENT_READ, self._heard)

    def ring(self) -> None:
        """End the wait under way, or the next wait. Safe from any thread and signal handler."""
        with self._lock:
            if self._write >= 0:
                with suppress(BlockingIOError):  # the pipe is full: the alarm rings already
                    os.write(self._write, b"!")

    def close(self) -> None:
        """Close the pipe, unless the pipe is closed."""
        with self._lock:
            if self._write >= 0:
                write, self._write = self._write, -1
                with suppress(KeyError, RuntimeError, ValueError):  # the selector is closed
                    self._selector.unregister(self._read)
                os.close(self._read)
                os.close(write)

    def _heard(self) -> None:
        with self._lock:
            if self._write < 0:
                return  # closed by a callback before, in the same round
            with suppress(BlockingIOError):
                os.read(self._read, 4096)


_HEADER = struct.Struct("<I")
_CHUNK = 1 << 16
_MOST_FDS = 8  # with one message
# Without the flag a script that restores SIGPIPE's default action would end with the other process.
_NO_SIGNAL = int(getattr(socket, "MSG_NOSIGNAL", 0))
# Plain numbers: the union of two flags of an enumeration takes microseconds.
_AT_ONCE = int(socket.MSG_DONTWAIT)


class Wire:
    """An end of a wire. Not thread-safe. The receiver of descriptors owns the descriptors.

    All methods that receive raise ``UserError`` if this process cannot take more descriptors.

    Attributes:
        fds: received descriptors; the reader of a message removes the descriptors of the message.
        is_cut: whether the other end is closed, and everything was received.
    """

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.fds: list[int] = []
        self.is_cut = False
        self._received = bytearray()
        self._outbox: deque[_UnsentMessage] = deque()
        self._selector: BaseSelector | None = None
        self._awaits_room = False  # whether the selector waits for room in the socket

    @classmethod
    def pair(cls) -> tuple[Wire, Wire]:
        """Return the two ends of a new wire."""
        ours, theirs = socket.socketpair()
        return cls(ours), cls(theirs)

    @classmethod
    @contextmanager
    def handed_over(cls) -> Iterator[tuple[Wire, Wire]]:
        """Yield the two ends of a new wire; after the block a further process has the second.

        After an exception both are closed.
        """
        ours, theirs = cls.pair()
        with closing(theirs), ExitStack() as undo:
            undo.callback(ours.close)
            yield ours, theirs
            undo.pop_all()

    def send(self, message: WorkerMessage, fds: Sequence[int] = ()) -> None:
        """Send a message. Blocks while the other end has some 100 kB to read.

        A message to an ended process is lost without an error, because the supervisor sees the end.
        """
        data = _framed(message)
        try:
            if fds:
                data = data[self._sent(data, fds, 0) :]
            self.socket.sendall(data, _NO_SIGNAL)
        except (BrokenPipeError, ConnectionResetError):
            pass  # messages from the other end may still be unread

    def post(self, message: WorkerMessage, *fds: int) -> None:
        """Send as much of a message as the socket has room for. Does not block.

        The process of the other end may be stopped. The rest of the message waits, with copies of
        the descriptors, for ``flush``. Do not mix ``post`` and ``send``.
        """
        self._outbox.append(_UnsentMessage(_framed(message), [os.dup(fd) for fd in fds]))
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
                self._forget_outbox()  # no process will read the messages
                break
            first.close()  # descriptors go with the first byte
            first.data = first.data[sent:]
            if not first.data:
                self._outbox.popleft()
        if self._selector is not None and self.has_unsent is not self._awaits_room:
            self._awaits_room = self.has_unsent
            events = EVENT_READ | (EVENT_WRITE if self._awaits_room else 0)
            key = self._selector.get_key(self.socket)
            self._selector.modify(self.socket, events, key.data)

    def watch(self, selector: BaseSelector, hear: Callable[[], None]) -> None:
        """Have a selector call ``hear`` for received bytes, and for room if messages wait.

        A cut ends the watch.
        """
        self._selector, self._awaits_room = selector, False
        selector.register(self.socket, EVENT_READ, hear)
        self.flush()

    def _end_watch(self) -> None:
        selector, self._selector = self._selector, None
        if selector is not None:
            with suppress(KeyError):
                selector.unregister(self.socket)

    @property
    def has_unsent(self) -> bool:
        """True if a posted message waits for room in the socket."""
        return bool(self._outbox)

    def receive(self) -> WorkerMessage | None:
        """Return the next message, or None if the other end is closed. Blocks."""
        while (message := self._take()) is None and not self.is_cut:
            self._read(0)
        return message

    def arrived(self) -> list[WorkerMessage]:
        """Return all received messages, with the memory of outputs. Does not block."""
        while not self.is_cut:
            try:
                self._read(_AT_ONCE)
            except BlockingIOError:
                break
        messages = []
        while (message := self._take()) is not None:
            if isinstance(message, ShardsDone) and message.memory is not None:
                fd = self.fds.pop(0)
                message.memory = Segment(os.fstat(fd).st_size, fd)
            messages.append(message)
        return messages

    def close(self) -> None:
        """Close this end. The other end is cut after the sent messages."""
        self._end_watch()
        self._forget_outbox()
        self.socket.close()

    def _sent(self, data: bytes, fds: Sequence[int], flags: int) -> int:
        """Send the beginning of data, with descriptors; return the number of sent bytes."""
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
        if not data:
            self.is_cut = True
            self._end_watch()  # a selector would report the end for ever

    def _take(self) -> WorkerMessage | None:
        if len(self._received) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._received)
        end = _HEADER.size + length
        if len(self._received) < end:
            return None
        payload = bytes(self._received[_HEADER.size : end])
        del self._received[:end]
        return READER.unpack(payload)


@dataclass(eq=False)
class _UnsentMessage:
    """The unsent rest of a posted message, with descriptors of its own."""

    data: bytes
    fds: list[int]

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


def _framed(message: WorkerMessage) -> bytes:
    payload = pack(message)
    return _HEADER.pack(len(payload)) + payload
