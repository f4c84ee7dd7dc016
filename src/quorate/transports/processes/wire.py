"""The wire between the coordinator and one worker: small JSON messages over a pair of sockets.

What is large lies in shared memory, whose descriptors travel with a message. A message: its length
in 4 bytes, then JSON.
"""

from __future__ import annotations

import array
import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

_HEADER = struct.Struct("<I")
_CHUNK = 1 << 16
_FDS_SPACE = socket.CMSG_SPACE(8 * array.array("i").itemsize)


class Wire:
    """One end of a wire. The receiver of descriptors owns them. Not thread-safe."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.fds: list[int] = []  # received, and not yet taken
        self.is_cut = False  # nothing more will come: the other end is closed
        self._received = bytearray()

    @classmethod
    def pair(cls) -> tuple[Wire, Wire]:
        """Return the two ends of a new wire."""
        ours, theirs = socket.socketpair()
        return cls(ours), cls(theirs)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message. It blocks only if the other end has left some 100 kB unread.

        A message to a process that is gone is lost without an error: its end is seen elsewhere.
        """
        payload = json.dumps(message).encode()
        data = _HEADER.pack(len(payload)) + payload
        try:
            if fds:
                sent = socket.send_fds(self.socket, [data], list(fds))
                data = data[sent:]
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass  # and what it sent before is still to be read

    def receive(self) -> Message | None:
        """Return the next message, or None when the other end is closed. Blocks."""
        while (message := self._take()) is None and not self.is_cut:
            self._read(0)
        return message

    def arrived(self) -> list[Message]:
        """Return all messages that are here. Does not block."""
        while not self.is_cut:
            try:
                self._read(socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
        messages = []
        while (message := self._take()) is not None:
            messages.append(message)
        return messages

    def close(self) -> None:
        """Close this end; the other one is cut when it has read what was sent."""
        self.socket.close()

    def _read(self, flags: int) -> None:
        fds = array.array("i")
        # Else what the worker starts would inherit them.
        flags |= getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        try:
            # socket.recv_fds of Python 3.11 ignores its flags.
            data, extra, _, _ = self.socket.recvmsg(_CHUNK, _FDS_SPACE, flags)
        except ConnectionResetError:
            data, extra = b"", []
        for level, kind, payload in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(payload[: len(payload) // fds.itemsize * fds.itemsize])
        self._received += data
        self.fds += fds
        self.is_cut = not data

    def _take(self) -> Message | None:
        if len(self._received) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._received)
        end = _HEADER.size + length
        if len(self._received) < end:
            return None
        message: Message = json.loads(bytes(self._received[_HEADER.size : end]))
        del self._received[:end]
        return message
