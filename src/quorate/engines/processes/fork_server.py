"""The fork server: a process that has imported torch, and forks into workers on request.

The server has one thread, and has initialised neither OpenMP nor CUDA, which do not survive a fork:
modules are imported, and none is used. (OpenBLAS, in NumPy, has a thread from the import on, and
ends the thread before a fork.)
"""

from __future__ import annotations

import gc
import importlib
import os
import selectors
import socket
import sys
from typing import NamedTuple

import numpy as np
import torch

from quorate.engines.processes import worker
from quorate.engines.processes.wire import Wire
from quorate.engines.processes.worker_messages import ForkWorker, WorkerExited, WorkerForked
from quorate.machine.dies_with_parent import die_with
from quorate.machine.environment import become
from quorate.machine.standard_streams import flush_standard_streams


def run(*, wire: int) -> None:
    """Fork on request; in each fork, run a worker, and return or raise as ``worker.run`` does.

    So a fork ends as any program does: with a traceback, an exit code, and functions of ``atexit``.
    The fork server itself does not return. The server ends when the wire is cut.

    Args:
        wire: descriptor of the server's end of the wire. Each message is a ``ForkWorker``.
    """
    gc.collect()
    gc.freeze()  # a collection in a fork would write to, and so copy, every page
    request, worker_wire, output = _ForkLoop(Wire(socket.socket(fileno=wire))).serve()
    sys.path[:] = request.path
    become(request.environment)
    importlib.invalidate_caches()  # the folders may have changed since the imports
    # Forks get different seeds, as new interpreters do; ``random`` seeds itself after a fork.
    np.random.seed()
    torch.default_generator.seed()
    worker.run(wire=worker_wire, output=output)


class _ForkedWorker(NamedTuple):
    """A forked worker, until the server has its exit code."""

    pid: int
    handle: int  # a descriptor, readable after the end of the process
    report: Wire

    def close(self) -> None:
        os.close(self.handle)
        self.report.close()


class _ForkLoop:
    """The server's loop: forks on request, and reports each child's pid and exit code."""

    def __init__(self, wire: Wire) -> None:
        self._pid = os.getpid()
        self._wire = wire
        self._selector = selectors.DefaultSelector()
        self._selector.register(wire.socket, selectors.EVENT_READ)

    def serve(self) -> tuple[ForkWorker, int, int]:
        """Return, only in a fork, its request and the descriptors of wire and output. Blocks."""
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._reap(key.data)
            for message in self._wire.arrived():
                assert isinstance(message, ForkWorker)
                report, wire, output = (self._wire.fds.pop(0) for _ in range(3))
                if self._forks(Wire(socket.socket(fileno=report))):
                    return message, wire, output
                os.close(wire)
                os.close(output)
            if self._wire.is_cut:
                os._exit(0)  # its children die with it

    def _forks(self, report: Wire) -> bool:
        """Fork, and return whether this process is the child."""
        flush_standard_streams()  # else each fork writes the content of the buffer
        try:
            pid = os.fork()
        except OSError as error:  # too many processes, or no memory
            report.send(WorkerExited(1, str(error)))
            report.close()
        else:
            if pid == 0:
                self._leave(report)
                return True
            self._keep(pid, report)
        return False

    def _leave(self, report: Wire) -> None:
        """Leave the server's process group, and close the server's descriptors."""
        os.setpgid(0, 0)  # a terminal's Ctrl-C is the coordinator's
        die_with(self._pid)
        # Only now: while the report is open this process may outlive the fork server.
        report.close()
        children = [key.data for key in self._selector.get_map().values() if key.data is not None]
        self._selector.close()
        self._wire.close()
        for fd in self._wire.fds:  # of later requests
            os.close(fd)
        for child in children:
            child.close()

    def _keep(self, pid: int, report: Wire) -> None:
        child = _ForkedWorker(pid, os.pidfd_open(pid), report)
        self._selector.register(child.handle, selectors.EVENT_READ, child)
        report.send(WorkerForked(pid), [child.handle])

    def _reap(self, child: _ForkedWorker) -> None:
        _, status = os.waitpid(child.pid, 0)
        child.report.send(WorkerExited(os.waitstatus_to_exitcode(status)))
        self._selector.unregister(child.handle)
        child.close()
