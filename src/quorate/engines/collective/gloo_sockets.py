"""The sockets that connect this process with other ranks through gloo.

A thread that waits in gloo for a silent rank waits for ever, unless its connection ends: gloo takes
a connection that this process has shut down for a connection that the other rank has closed, and
raises an error.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class GlooSockets:
    """Sockets that were opened within ``noting``."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}  # by descriptor, the system's name of the socket

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Within the block note the sockets that are opened."""
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
