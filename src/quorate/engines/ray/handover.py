"""Near: a worker on the coordinator's own node has its memory and a wire, as without Ray.

Ray places it; its agent starts it, watches it, and tells how it ended. But the coordinator's end of
its wire the agent hands over, with a descriptor of its process, through a socket that takes it from
this user's processes alone. From then on nothing goes through the agent, and nothing is copied.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import struct
import sys
import threading
from contextlib import suppress
from selectors import EVENT_READ, BaseSelector

from quorate.engines.processes.pool import Callback
from quorate.engines.processes.wire import Wire
from quorate.machine.limits import HANDOVER_S, KILLED_EXIT_S


class LocalConnection:
    """What the coordinator has of such a worker. ``close`` it when its agent has ended.

    Args:
        wire: the coordinator's end.
        process: a descriptor that is readable when the process has ended.
    """

    def __init__(self, wire: Wire, process: int) -> None:
        self.line = wire
        self._process = process
        # Held while the descriptor is used: closed meanwhile, its number may be another process's.
        self._lock = threading.Lock()
        self._selector: BaseSelector | None = None

    def watch(self, selector: BaseSelector, hear: Callback, look: Callback) -> None:
        """Have a selector tell when it was heard from, or takes what waits, and when it ended."""
        self.line.watch(selector, hear)
        self._selector = selector
        selector.register(self._process, EVENT_READ, look)

    def kill(self) -> None:
        """End it as signal 9 does. Does not block. Any thread may, also when it is closed."""
        with self._lock:
            if self._process >= 0:
                with suppress(ProcessLookupError):  # it has ended
                    signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def has_ended(self) -> bool:
        """Return whether it writes to memory no more, whatever its agent knows. Does not block."""
        with self._lock:
            return self._process < 0 or self._poll(0)

    def close(self) -> None:
        """Wait for its end, which comes with that of its agent, and close what there is.

        Called once, by the thread that watches it.
        """
        self._poll(KILLED_EXIT_S)  # without the lock: another thread may want it killed meanwhile
        if self._selector is not None:
            self._selector.unregister(self._process)
        with self._lock:
            process, self._process = self._process, -1
            os.close(process)
        self.line.close()

    def _poll(self, timeout_s: float) -> bool:
        poll = select.poll()  # select() itself takes no descriptor above 1023
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))


class HandoverSocket:
    """Where agents of the coordinator's node hand over wires. ``close`` it.

    Its name is in no folder, so that nothing is left of it after a kill -9.

    Raises:
        OSError: this system has no such sockets.
    """

    def __init__(self) -> None:
        self.name = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._handed: dict[str, LocalConnection] = {}  # by key, not taken yet
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
        """Return what an agent says that it has handed over. Any thread may; it does not wait long.

        Raises:
            OSError: it is not there.
        """
        with self._lock:
            while key not in self._handed:
                connection, _ = self._socket.accept()
                with connection:
                    if _is_own_users(connection):
                        self._hear(connection)
            return self._handed.pop(key)

    def close(self) -> None:
        """Close it, and what was handed over and never taken."""
        for near in self._handed.values():
            near.close()
        self._socket.close()

    def _hear(self, connection: socket.socket) -> None:
        connection.settimeout(HANDOVER_S)
        message = (end := Wire(connection)).receive()
        if message is not None and len(end.fds) == 2:
            wire, process = end.fds
            self._handed[message["key"]] = LocalConnection(
                Wire(socket.socket(fileno=wire)), process
            )


def hand_over(door: str, key: str, wire: Wire, process: int) -> bool:
    """Hand over the coordinator's end of a wire, and a descriptor of the worker; return whether.

    The caller goes on to own both.

    Args:
        door: its name.
    """
    try:
        with socket.socket(socket.AF_UNIX) as to:
            to.connect(_address(door))
            if not _is_own_users(to):
                return False
            Wire(to).send({"key": key}, [wire.socket.fileno(), process])
    except OSError:  # the door is in another container, or closed
        return False
    return True


def _address(name: str) -> str:
    return f"\0quorate-{name}"


def _is_own_users(end: socket.socket) -> bool:
    """Return whether the process at the other end is this user's: such names are open to all."""
    credentials = struct.Struct("3i")  # pid, uid, gid
    found = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    return bool(credentials.unpack(found)[1] == os.getuid())
