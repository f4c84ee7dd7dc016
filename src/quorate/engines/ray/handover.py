"""Handover of workers on the coordinator's own node: shared memory and a wire, as without Ray.

Ray places the worker; an actor starts and watches the worker, and reports its end. But the actor
hands the coordinator's end of the wire over, with a descriptor of the worker's process, through a
socket that accepts processes of this user alone. From then on nothing goes through the actor, and
nothing is copied.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import struct
import sys
import threading
from contextlib import suppress
from selectors import EVENT_READ, BaseSelector

from quorate.engines.processes.pool import Callback
from quorate.engines.processes.wire import Wire
from quorate.engines.processes.worker_messages import HandOver
from quorate.machine.descriptors import any_readable
from quorate.machine.limits import HANDOVER_S, KILLED_EXIT_S


class LocalConnection:
    """The wire and the process of a worker that was handed over. ``close`` after the actor's end.

    Args:
        wire: the coordinator's end.
        process: a descriptor, readable when the process has ended.
    """

    def __init__(self, wire: Wire, process: int) -> None:
        self.line = wire
        self._process = process
        # Held while the descriptor is used: closed meanwhile, its number may be another process's.
        self._lock = threading.Lock()
        self._selector: BaseSelector | None = None

    def watch(self, selector: BaseSelector, hear: Callback, look: Callback) -> None:
        """Have a selector call ``hear`` when messages can be moved, and ``look`` at the end."""
        self.line.watch(selector, hear)
        self._selector = selector
        selector.register(self._process, EVENT_READ, look)

    def kill(self) -> None:
        """Send signal 9, unless the connection is closed. Does not block. Thread-safe."""
        with self._lock:
            if self._process >= 0:
                with suppress(ProcessLookupError):  # the process has ended
                    signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def has_ended(self) -> bool:
        """Return whether the process is gone: only then is shared memory quiet. Does not block."""
        with self._lock:
            return self._process < 0 or any_readable(self._process, timeout_s=0.0)

    def close(self) -> None:
        """Wait for the end of the process, soon after the actor's, and close all descriptors.

        Called once, by the thread that watches the worker.
        """
        # Without the lock: a thread may want to kill the process now.
        any_readable(self._process, timeout_s=KILLED_EXIT_S)
        if self._selector is not None:
            self._selector.unregister(self._process)
        with self._lock:
            process, self._process = self._process, -1
            os.close(process)
        self.line.close()


class HandoverSocket:
    """The socket where actors of the coordinator's node hand over workers. Needs ``close``.

    The name of the socket is in no folder, so that nothing is left after a kill -9.

    Raises:
        OSError: this system has no such sockets.
    """

    def __init__(self) -> None:
        self.name = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._waiting: dict[str, LocalConnection] = {}  # by key, not taken yet
        if sys.platform != "linux":
            raise OSError("names of sockets without a file are Linux's")
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(_address(self.name))
            self._socket.listen(socket.SOMAXCONN)
            self._socket.settimeout(HANDOVER_S)
        except BaseException:
            self._socket.close()
            raise

    def take(self, key: str) -> LocalConnection:
        """Return the connection that an actor has announced. Does not block long. Thread-safe.

        Raises:
            OSError: the connection is not there.
        """
        with self._lock:
            while key not in self._waiting:
                end, _ = self._socket.accept()
                with end:
                    if _is_of_this_user(end):
                        self._receive(end)
            return self._waiting.pop(key)

    def close(self) -> None:
        """Close the socket, and all connections that were never taken."""
        for connection in self._waiting.values():
            connection.close()
        self._socket.close()

    def _receive(self, end: socket.socket) -> None:
        end.settimeout(HANDOVER_S)
        message = (sender := Wire(end)).receive()
        if isinstance(message, HandOver) and len(sender.fds) == 2:
            wire, process = sender.fds
            connection = LocalConnection(Wire(socket.socket(fileno=wire)), process)
            self._waiting[message.key] = connection


def hand_over(door: str, key: str, wire: Wire, process: int) -> bool:
    """Hand over the coordinator's end of a wire, and a descriptor of the worker's process.

    The caller goes on to own both.

    Args:
        door: the name of the coordinator's ``HandoverSocket``.
        key: of the worker.

    Returns:
        Whether the coordinator has both.
    """
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(_address(door))
            if not _is_of_this_user(end):
                return False
            Wire(end).send(HandOver(key), [wire.socket.fileno(), process])
    except OSError:  # the coordinator is in another container, or has closed the socket
        return False
    return True


def _address(name: str) -> str:
    return f"\0quorate-{name}"


def _is_of_this_user(end: socket.socket) -> bool:
    """Return whether the process at the far end is this user's: all users may connect."""
    credentials = struct.Struct("3i")  # pid, uid, gid
    found = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    return bool(credentials.unpack(found)[1] == os.getuid())
