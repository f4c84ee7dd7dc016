"""Gloo sockets: the connections of this process to other ranks, so that they can be cut.

Whoever waits in gloo for a rank that says nothing more waits for ever: there is no other way out of
it. It takes a connection that was shut for one that the other end has closed, and raises.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FOLDERS = (Path("/proc/self/fd"), Path("/dev/fd"))


class GlooSockets:
    """The connections that were made while it was looked."""

    def __init__(self) -> None:
        self._sockets: dict[int, str] = {}  # descriptor -> what it is, as the system names it

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Take connections that are made within the block for links."""
        before = _sockets()
        try:
            yield
        finally:
            self._sockets |= {fd: name for fd, name in _sockets().items() if before.get(fd) != name}

    def cut(self) -> None:
        """Shut them: whoever waits in one of them raises. It cannot be undone. Any thread."""
        now = _sockets()
        for fd, name in self._sockets.items():
            if now.get(fd) != name:
                continue  # it was closed
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as link:
                # gloo ends the process when one that listens is shut.
                if not link.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    link.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, str]:
    found = {}
    for folder in _FOLDERS:
        with suppress(OSError):
            for entry in list(folder.iterdir()):
                with suppress(OSError, ValueError):
                    name = str(entry.readlink())
                    if name.startswith("socket:"):
                        found[int(entry.name)] = name
            break
    return found
