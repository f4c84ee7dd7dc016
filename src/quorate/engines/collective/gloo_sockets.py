"""The sockets of gloo to all ranks.

A thread waits in gloo for a silent rank for ever, unless the connection ends. If this process shuts
a connection down, gloo behaves as if the silent rank had closed the connection, and raises.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class GlooSockets:
    """Sockets opened within ``noting``."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}  # by descriptor, the system's name of the socket

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Within the block note all newly opened sockets."""
        before = _sockets()
        try:
            yield
        finally:
            self._names |= dict(_sockets().items() - before.items())

    def shut_down(self) -> None:
        """Shut the sockets down for good: threads that wait in gloo raise. Any thread calls."""
        for fd, _ in self._names.items() & _sockets().items():  # those that are still open
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as link:
                # If a listening socket is shut down, gloo ends the process.
                if not link.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    link.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, str]:
    """Return the name of each open socket of this process, by descriptor; empty without /proc."""
    found = {}
    with suppress(OSError):
        for entry in list(Path("/proc/self/fd").iterdir()):
            with suppress(OSError):  # closed meanwhile
                name = str(entry.readlink())
                if name.startswith("socket:"):
                    found[int(entry.name)] = name
    return found
