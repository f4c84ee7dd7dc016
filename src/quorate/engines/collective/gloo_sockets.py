"""The sockets of gloo to all ranks.

A thread waits in gloo for a silent rank for ever, unless the connection ends. If this process shuts
a connection down, gloo behaves as if the silent rank had closed the connection, and raises.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

OpenSocket = tuple[int, str]  # the descriptor, and the system's name of the socket


def open_sockets() -> set[OpenSocket]:
    """Return all open sockets of this process; none without /proc."""
    found = set()
    with suppress(OSError):
        for entry in list(Path("/proc/self/fd").iterdir()):
            with suppress(OSError):  # closed meanwhile
                name = str(entry.readlink())
                if name.startswith("socket:"):
                    found.add((int(entry.name), name))
    return found


def shut_down(sockets: Set[OpenSocket]) -> None:
    """Shut sockets down for good: threads that wait in gloo raise. Any thread calls."""
    for fd, _ in sockets & open_sockets():  # the descriptors of closed sockets may be reused
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as link:
            # If a listening socket is shut down, gloo ends the process.
            if not link.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                link.shutdown(socket.SHUT_RDWR)
