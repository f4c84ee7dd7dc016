"""The fork server: a process that has imported torch, and forks into workers when it is asked to.

It has one thread, and has initialised neither OpenMP nor CUDA, which do not survive a fork: it
imports, and does nothing else with what it imported. (OpenBLAS, in NumPy, has a thread from its
import on, and ends it before a fork by itself.)
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
from quorate.machine.dies_with_parent import die_with
from quorate.machine.environment import become
from quorate.machine.standard_streams import flush_standard_streams


def run(*, wire: int) -> None:
    """Fork when asked to; in each fork, run a worker, and return or raise as ``worker.run`` does.

    So a fork ends as any program does: with its traceback, its exit code, and what it wanted done
    ``atexit``. The fork server itself does not return. It ends when its wire is cut.

    Args:
        wire: descriptor of its end of the wire. Each message holds the ``sys.path`` and the
            environment of a worker, and comes with descriptors: a wire to report on, then the
            worker's two.
    """
    gc.collect()
    gc.freeze()  # a collection in a fork would write to, and so copy, every page
    task = _ForkServer(Wire(socket.socket(fileno=wire))).serve()
    sys.path[:] = task.path
    become(task.environment)
    importlib.invalidate_caches()  # of the folders as they were
    # Each its own, as processes from nothing have; ``random`` sees to that itself.
    np.random.seed()
    torch.default_generator.seed()
    worker.run(wire=task.wire, output=task.output)


class _Task(NamedTuple):
    """What a fork is to do."""

    path: list[str]
    environment: dict[str, str]
    wire: int
    output: int


class _Child(NamedTuple):
    """A process that was forked."""

    pid: int
    handle: int  # a descriptor, readable when it has ended
    report: Wire

    def close(self) -> None:
        os.close(self.handle)
        self.report.close()


class _ForkServer:
    """The server's loop: forks when it is asked to, and reports each child's pid and exit code."""

    def __init__(self, wire: Wire) -> None:
        self._pid = os.getpid()
        self._wire = wire
        self._children: set[_Child] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(wire.socket, selectors.EVENT_READ)

    def serve(self) -> _Task:
        """Return the task in a fork, and there alone. Blocks."""
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._reap(key.data)
            for message in self._wire.arrived():
                report, *fds = (self._wire.fds.pop(0) for _ in range(3))
                task = _Task(message["path"], message["environment"], *fds)
                if self._forks(Wire(socket.socket(fileno=report)), task):
                    return task
            if self._wire.is_cut:
                os._exit(0)  # its children die with it

    def _forks(self, report: Wire, task: _Task) -> bool:
        """Fork, and return whether this is the child."""
        flush_standard_streams()  # else each fork writes what is in the buffer
        try:
            pid = os.fork()
        except OSError as error:  # too many processes, or no memory
            report.send({"error": str(error)})
            report.close()
        else:
            if pid == 0:
                self._leave(report)
                return True
            self._keep(pid, report)
        os.close(task.wire)
        os.close(task.output)
        return False

    def _leave(self, report: Wire) -> None:
        """Leave the server's group, and close what is the server's."""
        os.setpgid(0, 0)  # a terminal's Ctrl-C is the coordinator's
        die_with(self._pid)
        # Only now: while the report is open this process may outlive the fork server.
        report.close()
        self._selector.close()
        self._wire.close()
        for fd in self._wire.fds:  # of those that are yet to be forked
            os.close(fd)
        for child in self._children:
            child.close()

    def _keep(self, pid: int, report: Wire) -> None:
        child = _Child(pid, os.pidfd_open(pid), report)
        self._children.add(child)
        self._selector.register(child.handle, selectors.EVENT_READ, child)
        report.send({"pid": pid}, [child.handle])

    def _reap(self, child: _Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        child.report.send({"code": os.waitstatus_to_exitcode(status)})
        self._selector.unregister(child.handle)
        self._children.remove(child)
        child.close()
