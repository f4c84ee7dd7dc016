"""How a worker's process is started: a new interpreter, or a fork of the fork server.

A new interpreter imports torch first, which takes seconds of a core. The fork server has done so
once, and a worker's process costs a fork. It is used on Linux, where a fork is safe and a process
can be held by a descriptor; elsewhere a new interpreter is spawned for each. The first server may
be there already: see ``standby``.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Protocol

from quorate.engines import standby
from quorate.engines.processes import fork_server, worker
from quorate.engines.processes.script import Script
from quorate.engines.processes.wire import Wire
from quorate.engines.standby import Server, ServerProcess
from quorate.machine import dies_with_parent
from quorate.machine.cores import usable_cores
from quorate.machine.environment import child_environment
from quorate.machine.limits import EXIT_REPORT_S
from quorate.machine.standard_streams import inherited_by_children
from quorate.machine.surroundings import can_fork


class Process(Protocol):
    """A worker's process, from the moment it was asked for."""

    pid: int | None  # None: not forked yet
    exit: int | None  # a descriptor, readable when ``has_ended`` knows more; None: there is no such
    error: str | None  # why there is no process, if it could not be forked

    def has_ended(self) -> bool:
        """Return whether it is gone and its exit code known. Reads reports; does not block."""

    def kill(self) -> None:
        """Send it signal 9, also if it is yet to be forked. Does not block."""

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return its exit code, -n after signal n; None if it has not ended in time. Blocks."""

    def close(self) -> None:
        """Close what belonged to it. It must have ended."""


class Starter(Protocol):
    """Whoever starts processes that run ``worker.run``."""

    def start(self, wire: Wire, output: IO[bytes]) -> Process:
        """Ask for a process that has this end of a wire and this output. It need not be there yet.

        Raises:
            OSError: it cannot be started.
        """

    def flush(self) -> None:
        """Pass on what it was asked for and could not pass on yet. Does not block."""

    def close(self) -> None:
        """End what it keeps running; its processes must have ended."""


def have_ready(script: Script, workers: int, *, threads: int) -> None:
    """Have a fork server import torch while something else is done; ``new_starter`` takes it.

    Args:
        threads: of each worker.
    """
    if can_fork() and not standby.is_ready():
        # Without a process now there may be one later.
        with suppress(OSError):
            standby.keep(new_server(script, spins=workers * threads <= usable_cores()))


def new_starter(script: Script, workers: int, *, threads: int) -> Starter:
    """Return the fastest starter of this system, for workers that run a script.

    Args:
        threads: of each worker. They may spin while they wait for each other if each has a core.
    """
    spins = workers * threads <= usable_cores()
    if not can_fork():
        return Spawner(script, spins=spins)
    # OpenMP has read by now whether its threads spin, and a thread alone waits for no other.
    ready = standby.taken() if spins or threads == 1 else None
    return ForkServer(script, spins=spins, server=ready)


class Spawner:
    """A starter that spawns a new interpreter for each process."""

    def __init__(self, script: Script, *, spins: bool) -> None:
        self._script = script
        self._spins = spins

    def start(self, wire: Wire, output: IO[bytes]) -> Process:
        """Spawn a new interpreter. Blocks for some milliseconds."""
        fds = {"wire": wire.socket.fileno(), "output": output.fileno()}
        return _Spawned(_run(worker.__name__, fds, self._script, spins=self._spins))

    def flush(self) -> None:
        """Do nothing: nothing waits."""

    def close(self) -> None:
        """Do nothing: it keeps nothing running."""


class ForkServer:
    """A starter that has a server fork; the first start after it was killed runs a new server.

    Args:
        server: one that is there; this object ends it.
    """

    def __init__(self, script: Script, *, spins: bool, server: Server | None = None) -> None:
        self._script = script
        self._spins = spins
        self._server = server

    def start(self, wire: Wire, output: IO[bytes]) -> Process:
        """Ask the server for a fork; run a server first if there is none. Does not block."""
        if self._server is None or self._server.process.poll() is not None:
            self.close()
            self._server = new_server(self._script, spins=self._spins)
        server = self._server
        report, theirs = Wire.pair()
        try:
            # If the server dies now, what was sent is closed with it, and the report is cut.
            fds = [theirs.socket.fileno(), wire.socket.fileno(), output.fileno()]
            # It may be stopped, or have a hundred forks to make yet.
            server.wire.post({"path": _path(), "environment": _environment(spins=self._spins)}, fds)
        except BaseException:
            report.close()
            raise
        finally:
            theirs.close()
        return _Forked(server.process, report)

    def flush(self) -> None:
        """Ask for the forks that the server had no room to be asked for. Does not block."""
        if self._server is not None:
            self._server.wire.flush()

    def close(self) -> None:
        """End the server."""
        server, self._server = self._server, None
        if server is not None:
            server.close()


def new_server(script: Script, *, spins: bool) -> Server:
    """Return a fork server from nothing.

    Raises:
        OSError: it cannot be started.
    """
    ours, theirs = Wire.pair()
    try:
        fds = {"wire": theirs.socket.fileno()}
        return Server(_run(fork_server.__name__, fds, script, spins=spins), ours)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()


class _Spawned:
    """A child of this process."""

    error: str | None = None

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.pid: int | None = popen.pid
        self.exit: int | None = None
        # Its wire tells of its end too, unless the process has children that inherited it.
        with suppress(AttributeError, OSError):  # another system, an old kernel, a sandbox
            self.exit = os.pidfd_open(popen.pid)

    def has_ended(self) -> bool:
        return self._popen.poll() is not None

    def kill(self) -> None:
        self._popen.kill()

    def wait(self, timeout_s: float | None = None) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._popen.wait(timeout_s)
        return None

    def close(self) -> None:
        if self.exit is not None:
            os.close(self.exit)
            self.exit = None


class _Forked:
    """A child of the fork server, which reports its pid, a descriptor of it, and its exit code.

    If the fork server dies its children die with it, and count as killed.

    Args:
        server: the fork server that was asked.
        report: the end of a wire that it reports on.
    """

    def __init__(self, server: ServerProcess, report: Wire) -> None:
        self._server = server
        self._report = report
        self._code: int | None = None
        self._handle: int | None = None  # no other process gets its number while this is open
        self.pid: int | None = None
        self.exit: int | None = report.socket.fileno()
        self.error: str | None = None

    def has_ended(self) -> bool:
        if self._code is None:
            for message in self._report.arrived():
                self._hear(message)
        # SIGKILL is on its way to it, and until it is gone it may write to shared memory.
        if self._code is None and self._report.is_cut and self._is_gone(0.1):
            code = self._server.wait()  # it is ending: its descriptors are closed
            self._code = code if code >= 0 else -signal.SIGKILL
        return self._code is not None

    def kill(self) -> None:
        if self.has_ended():
            return
        if self._handle is None:
            self._server.kill()  # it does not answer; what it might fork ends with it
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def wait(self, timeout_s: float | None = None) -> int | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        report = self._report.socket.fileno()
        while not self.has_ended():
            if self._handle is not None and self._is_gone(0.0):
                if not _readable([report], EXIT_REPORT_S):
                    self._code = -signal.SIGKILL  # its fork server hangs
                continue
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return None
            _readable([report] if self._handle is None else [report, self._handle], left_s)
        return self._code

    def close(self) -> None:
        self._report.close()
        if self._handle is not None:
            os.close(self._handle)
        self._handle = self.exit = None

    def _is_gone(self, timeout_s: float) -> bool:
        return self._handle is None or _readable([self._handle], timeout_s)

    def _hear(self, message: dict[str, object]) -> None:
        match message:
            case {"pid": int(pid)}:
                self.pid, self._handle = pid, self._report.fds.pop()
            case {"code": int(code)}:
                self._code = code
            case {"error": str(error)}:
                self.error, self._code = error, 1


def _run(
    module: str, fds: dict[str, int], script: Script, *, spins: bool
) -> subprocess.Popen[bytes]:
    """Start a process that dies with this one, and runs a module with descriptors."""
    stdout, stderr = inherited_by_children()
    return subprocess.Popen(
        [
            sys.executable,
            *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
            dies_with_parent.__file__,
            str(os.getpid()),
            module,
            json.dumps(_path()),
            json.dumps(fds),
        ],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=list(fds.values()),
        cwd=script.folder,
        env=_environment(spins=spins),
        process_group=0,  # a terminal's Ctrl-C is the coordinator's
    )


def _environment(*, spins: bool) -> dict[str, str]:
    return child_environment({} if spins else {"OMP_WAIT_POLICY": "passive"})


def _path() -> list[str]:
    return [place for place in sys.path if isinstance(place, str)]


def _readable(fds: Sequence[int], timeout_s: float | None) -> bool:
    """Whether one of them is readable, or is so in time."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))
