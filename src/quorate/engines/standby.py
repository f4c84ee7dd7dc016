"""The fork server on standby: there before workers are to be forked, and perhaps for nothing.

``quorate run`` has nothing in its process at first but what it imported: the state in which a fork
server is. A fork of it then costs milliseconds, where a server from nothing imports torch once more
before the first worker is there. A script that is started without the command has one import torch
while the model is tried. Who trains without worker processes sends it away.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from quorate.engines.processes import fork_server
from quorate.engines.processes.wire import Wire
from quorate.machine.dies_with_parent import JOB_SIGNALS, die_with
from quorate.machine.standard_streams import flush_standard_streams


class ServerProcess(Protocol):
    """The process of a fork server."""

    pid: int

    def poll(self) -> int | None:
        """Return its exit code, -n after signal n; None as long as it lives. Does not block."""

    def wait(self) -> int:
        """Return its exit code when it has ended. Blocks."""

    def kill(self) -> None:
        """Send it signal 9. Does not block."""


class Server(NamedTuple):
    """A fork server, and the coordinator's end of its wire. Whoever has it ends it."""

    process: ServerProcess
    wire: Wire

    def close(self) -> None:
        """End it, and wait for that."""
        self.wire.close()
        self.process.kill()
        self.process.wait()


_ready: Server | None = None  # that nobody has taken yet


@contextmanager
def on_standby() -> Iterator[None]:
    """Within the block a fork server is ready, until it is taken or sent away.

    To be called by the main thread, before anything was computed in this process and before it has
    threads: what OpenMP and CUDA set up does not survive a fork. The server does not come back from
    here, and neither do its forks: they end as worker processes do.
    """
    ours, theirs = Wire.pair()
    coordinator = os.getpid()
    flush_standard_streams()  # else both processes write what is in the buffer
    try:
        pid = os.fork()
    except OSError:  # too many processes, or no memory: perhaps later
        ours.close()
        theirs.close()
        yield
        return
    if pid == 0:
        ours.close()
        _become_server(theirs.socket, coordinator)
    theirs.close()
    keep(Server(_Child(pid), ours))
    try:
        yield
    finally:
        send_away()


def is_ready() -> bool:
    """Return whether there is one that nobody has taken."""
    return _ready is not None


def keep(server: Server) -> None:
    """Have a server ready; there must be none yet."""
    global _ready
    assert _ready is None
    _ready = server


def taken() -> Server | None:
    """Return the server that is ready, once; None if there is none, or it ended."""
    global _ready
    server, _ready = _ready, None
    if server is not None and server.process.poll() is not None:
        server.close()
        return None
    return server


def send_away() -> None:
    """End the server that is ready, if there is one: no workers are forked."""
    if (server := taken()) is not None:
        server.close()


def _become_server(end: socket.socket, coordinator: int) -> None:
    """Be a fork server, as a new interpreter would be one, to the end of this process."""
    for number in JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.setpgid(0, 0)  # a terminal's Ctrl-C is the coordinator's
    die_with(coordinator)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    fork_server.run(wire=end.detach())
    sys.exit()


class _Child:
    """A child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None
        self._lock = threading.RLock()  # a number that was waited for may be another's

    def poll(self) -> int | None:
        return self._waited(os.WNOHANG)

    def wait(self) -> int:
        code = self._waited(0)
        assert code is not None
        return code

    def kill(self) -> None:
        with self._lock:  # or another thread waits for it between the two
            if self.poll() is None:
                os.kill(self.pid, signal.SIGKILL)

    def _waited(self, options: int) -> int | None:
        with self._lock:
            if self._code is None:
                try:
                    pid, status = os.waitpid(self.pid, options)
                except ChildProcessError:  # somebody else has waited for all children
                    self._code = -signal.SIGKILL
                else:
                    if pid == self.pid:
                        self._code = os.waitstatus_to_exitcode(status)
            return self._code
