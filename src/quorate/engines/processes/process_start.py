"""Process start: a process that runs the script is a new interpreter, or a fork of the fork server.

A new interpreter imports torch first, which takes seconds of a core. The fork server has imported
torch once, and a worker costs a fork. Forks need Linux, where a descriptor can hold a process.

The fork server is ready before the first worker is needed. ``quorate run`` forks the server from
itself while the process has nothing but imports; a script that is started without the command has a
new server import torch while the model is tried. A run without worker processes ends the server.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, NamedTuple

import psutil

from quorate.engines.processes import fork_server, worker
from quorate.engines.processes.script import Script
from quorate.engines.processes.wire import Wire
from quorate.engines.processes.worker_messages import ForkWorker, WorkerExited, WorkerForked
from quorate.machine import dies_with_parent
from quorate.machine.descriptors import any_readable
from quorate.machine.dies_with_parent import JOB_SIGNALS, die_with
from quorate.machine.environment import child_environment
from quorate.machine.limits import EXIT_REPORT_S
from quorate.machine.resources import usable_cores
from quorate.machine.standard_streams import flush_standard_streams, inherited_by_children
from quorate.machine.surroundings import can_fork


class ProcessStarter:
    """Starts each worker as a new interpreter, or has a fork server fork the worker.

    After the death of the fork server, starts a new server. Close the object at the end.

    Args:
        script: run by the workers.
        workers: how many workers there are.
        threads: intra-op threads of each worker.
    """

    def __init__(self, script: Script, workers: int, *, threads: int) -> None:
        self.script = script
        # Whether OpenMP's idle threads may spin, which they may if each has a core.
        self._spins = spins = workers * threads <= usable_cores()
        self._forks = can_fork()
        # OpenMP has read by now whether threads spin, and a thread alone waits for no other.
        self._server = _take_standby() if spins or threads == 1 else None

    def start_process(
        self, wire: Wire, output: IO[bytes], environment: Mapping[str, str] | None = None
    ) -> Process:
        """Start ``worker.run`` with a wire and an output. Blocks for some milliseconds at most.

        Args:
            environment: of the process. Default: this process's.

        Raises:
            OSError: neither a process nor a fork server can be started.
        """
        if not self._forks:
            own_fds = {"wire": wire.socket.fileno(), "output": output.fileno()}
            return _spawn(worker.__name__, own_fds, self.script, environment, spins=self._spins)
        if self._server is None or self._server.process.has_ended():
            self.close()
            self._server = _new_server(self.script, spins=self._spins)
        server = self._server
        with Wire.handed_over() as (report, theirs):
            # If the server dies now, the sent descriptors are closed, and the report is cut.
            fds = [theirs.socket.fileno(), wire.socket.fileno(), output.fileno()]
            # The server may be stopped, or have a hundred requests to serve.
            own = _environment(environment, spins=self._spins)
            server.wire.post(ForkWorker(_path(), own), *fds)
        return ForkedProcess(server.process, report)

    def flush(self) -> None:
        """Send the requests for which the socket had no room. Does not block."""
        if self._server is not None:
            self._server.wire.flush()

    def close(self) -> None:
        """End the server; the workers must have ended."""
        server, self._server = self._server, None
        if server is not None:
            server.close()


# --- processes ------------------------------------------------------------------------------------


class ChildProcess:
    """A child of this process: a new interpreter, or a fork without ``multiprocessing``."""

    error: str | None = None

    def __init__(self, child: subprocess.Popen[bytes] | psutil.Process) -> None:
        self._child = child
        self.pid: int | None = child.pid
        # The wire tells of the end too, unless the process has children that inherited the wire.
        self.exit = _exit_of(child)

    def has_ended(self) -> bool:
        """Return whether the process is gone. Does not block."""
        return self.wait(0.0) is not None

    def kill(self) -> None:
        """Send signal 9, unless the process has ended. Does not block."""
        with suppress(psutil.NoSuchProcess):
            self._child.kill()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the exit code, -n after signal n; None after a timeout. Blocks."""
        with suppress(subprocess.TimeoutExpired, psutil.TimeoutExpired):
            return int(self._child.wait(timeout_s) or 0)
        return None

    def close(self) -> None:
        """Close the descriptor. The process must have ended; ``wait`` still returns its code."""
        os.close(self.exit)


def _exit_of(child: subprocess.Popen[bytes] | psutil.Process) -> int:
    """Return a descriptor, readable after the end of a child."""
    with suppress(AttributeError, OSError):  # another system, an old kernel, a sandbox
        return os.pidfd_open(child.pid)
    readable, written = os.pipe()

    def wait() -> None:
        child.wait()
        # A close would tell nothing while a fork of this process has a copy of the descriptor.
        with suppress(BrokenPipeError):
            os.write(written, b"!")
        os.close(written)

    threading.Thread(target=wait, name=f"quorate-waits-for-{child.pid}", daemon=True).start()
    return readable


class ForkedProcess:
    """A worker that is a child of the fork server.

    The server reports the pid, a descriptor of the process, and the exit code. The children of a
    server die with the server, and count as killed.

    Args:
        server: received the request for the fork.
        report: this process's end of the wire for reports.
    """

    def __init__(self, server: ChildProcess, report: Wire) -> None:
        self._server = server
        self._report = report
        self._code: int | None = None
        self._handle: int | None = None  # no other process gets the pid while this is open
        self.pid: int | None = None  # None: not forked yet
        self.exit = report.socket.fileno()  # readable when ``has_ended`` knows more
        self.error: str | None = None  # why there is no process, if the fork failed

    def has_ended(self) -> bool:
        """Return whether the process is gone and the exit code known. Does not block for long."""
        if self._code is None:
            for message in self._report.arrived():
                match message:
                    case WorkerForked(pid):
                        self.pid, self._handle = pid, self._report.fds.pop()
                    case WorkerExited(code, error):
                        self._code, self.error = code, error
        # SIGKILL is on the way, and until the process is gone it may write to shared memory.
        if self._code is None and self._report.is_cut and self._is_gone(0.1):
            code = self._server.wait() or 0  # the server is ending: its descriptors are closed
            self._code = code if code >= 0 else -signal.SIGKILL
        return self._code is not None

    def kill(self) -> None:
        """Send signal 9, also before the fork. Does not block."""
        if self.has_ended():
            return
        if self._handle is None:
            self._server.kill()  # no answer came; a later fork would end with the server
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the exit code, -n after signal n; None after a timeout. Blocks."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        report = self._report.socket.fileno()
        while not self.has_ended():
            if self._handle is not None and self._is_gone(0.0):
                if not any_readable(report, timeout_s=EXIT_REPORT_S):
                    self._code = -signal.SIGKILL  # the server hangs
                continue
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return None
            any_readable(*(fd for fd in (report, self._handle) if fd is not None), timeout_s=left_s)
        return self._code

    def close(self) -> None:
        """Close the report and the descriptor. The process must have ended."""
        self._report.close()
        if self._handle is not None:
            os.close(self._handle)
        self._handle = None

    def _is_gone(self, timeout_s: float) -> bool:
        return self._handle is None or any_readable(self._handle, timeout_s=timeout_s)


Process = ChildProcess | ForkedProcess


# --- the fork server ------------------------------------------------------------------------------


class ForkServer(NamedTuple):
    """A fork server, and the coordinator's end of the wire. The owner ends the server."""

    process: ChildProcess
    wire: Wire

    def close(self) -> None:
        """Kill the server, and wait for the end."""
        self.wire.close()
        self.process.kill()
        self.process.wait()
        self.process.close()


_standby: ForkServer | None = None  # not yet taken by a starter


@contextmanager
def fork_server_on_standby() -> Iterator[None]:
    """Within the block a fork of this process is a fork server, until taken by a starter.

    Call this from the main thread, before anything was computed in this process and before there
    are threads: what OpenMP and CUDA set up does not survive a fork. The server does not return
    from here, and neither do the server's forks: they end as worker processes do.
    """
    global _standby
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
    _standby = ForkServer(ChildProcess(psutil.Process(pid)), ours)
    try:
        yield
    finally:
        end_standby()


@contextmanager
def fork_server_starting(script: Script | None, workers: int, threads: int) -> Iterator[None]:
    """Within the block a fork server starts, beside other work.

    Args:
        script: run by the workers; None: there will be no workers.
        workers: number of workers.
        threads: intra-op threads of each.
    """
    global _standby
    try:
        if script is not None and _standby is None and can_fork():
            with suppress(OSError):  # without a process now there may be one later
                _standby = _new_server(script, spins=workers * threads <= usable_cores())
        yield
    finally:
        end_standby()  # a starter has taken the server, if there are workers


def end_standby() -> None:
    """End the server on standby, if there is one: no workers are forked."""
    if (server := _take_standby()) is not None:
        server.close()


def _take_standby() -> ForkServer | None:
    """Return the server on standby, once; None if there is none, or the server has ended."""
    global _standby
    server, _standby = _standby, None
    if server is not None and server.process.has_ended():
        server.close()
        return None
    return server


def _become_server(end: socket.socket, coordinator: int) -> None:
    """Be a fork server, as a new interpreter would be, to the end of this process."""
    for number in JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.setpgid(0, 0)  # a terminal's Ctrl-C is the coordinator's
    die_with(coordinator)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    fork_server.run(wire=end.detach())
    sys.exit()


def _new_server(script: Script, *, spins: bool) -> ForkServer:
    with Wire.handed_over() as (ours, theirs):
        fds = {"wire": theirs.socket.fileno()}
        return ForkServer(_spawn(fork_server.__name__, fds, script, spins=spins), ours)


# --- new interpreters -----------------------------------------------------------------------------


def _spawn(
    module: str,
    fds: dict[str, int],
    script: Script,
    environment: Mapping[str, str] | None = None,
    *,
    spins: bool,
) -> ChildProcess:
    """Start a new interpreter that dies with this process, and runs a module with descriptors."""
    stdout, stderr = inherited_by_children()
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    words = [str(os.getpid()), module, json.dumps(_path()), json.dumps(fds)]
    popen = subprocess.Popen(
        [sys.executable, *flags, dies_with_parent.__file__, *words],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=list(fds.values()),
        cwd=script.folder,
        env=_environment(environment, spins=spins),
        process_group=0,  # a terminal's Ctrl-C is the coordinator's
    )
    return ChildProcess(popen)


def _environment(environment: Mapping[str, str] | None, *, spins: bool) -> dict[str, str]:
    defaults = {} if spins else {"OMP_WAIT_POLICY": "passive"}
    return child_environment(defaults) if environment is None else {**defaults, **environment}


def _path() -> list[str]:
    return [place for place in sys.path if isinstance(place, str)]
