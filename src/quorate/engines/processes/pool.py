"""Pools of worker processes: where workers are started, and the coordinator's handle of each.

On this machine workers map the coordinator's memory, and each has a socket of its own. A pool of
several machines (``engines/ray``) passes on the contents of both.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from selectors import EVENT_READ, BaseSelector
from typing import IO, Protocol

from quorate.engines.collective.rank_place import RankPlace
from quorate.engines.model_changes import ModelChanges
from quorate.engines.processes import worker_messages as messages
from quorate.engines.processes.agreement import Comparison
from quorate.engines.processes.endings import Ending
from quorate.engines.processes.process_start import Process, ProcessStarter
from quorate.engines.processes.script import Script
from quorate.engines.processes.script_as_worker import facts_of_own_process
from quorate.engines.processes.wire import Wire
from quorate.engines.servers import Servers
from quorate.machine.descriptors import require_for_workers
from quorate.machine.limits import KILLED_EXIT_S

Callback = Callable[[], None]

_TAIL = 2000  # characters of the output that are shown


class WorkerHandle:
    """The coordinator's end of one worker's process, from the start to the exit.

    Attributes:
        number: the worker.
        line: to a process of this host; None without such a process: messages travel otherwise.
        comparison: of the process with the coordinator: see ``Agreement``.
        host: the name of the worker's host, if that is a different host, or a different container.
        is_placed: whether a machine has room for the worker; else a message "placed" follows.
        place: where results of several workers are added: see ``Joined``.
    """

    _process: Process  # from ``begin`` on; so is ``line``

    def __init__(self, number: int) -> None:
        self.number = number
        self.line: Wire | None = None
        self.comparison = Comparison()
        self.host: str | None = None
        self.is_placed = True
        self.place = ""
        self._is_cut = False  # where there is no line
        self._sent_changes = 0  # the number of the newest ``ModelChanges`` that were sent
        self._shared = self._stored = 0  # the numbers of the newest ``SharedValues`` that were sent
        self._selector: BaseSelector | None = None

    def begin(
        self,
        starter: ProcessStarter,
        *,
        place: RankPlace | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start a process on this machine. ``close`` ends the process. Does not block for long.

        Args:
            starter: starts the process.
            place: in a collective, if the worker is to be a rank.
            environment: of the process. Default: this process's.

        Raises:
            OSError: the process cannot be started; nothing is left.
        """
        with ExitStack() as undo:
            # The script's output up to its training loop.
            self._output: IO[bytes] = undo.enter_context(tempfile.TemporaryFile())
            with Wire.handed_over() as (ours, theirs):
                self._process = starter.start_process(theirs, self._output, environment)
                undo.callback(self._end_process)
                facts = facts_of_own_process()
                ours.post(messages.StartWorker(self.number, starter.script, place, facts))
            self.line = ours
            undo.pop_all()

    def watch(self, selector: BaseSelector, hear: Callback, look: Callback) -> None:
        """Have a selector call ``hear`` when messages can be moved, and ``look`` at the end."""
        assert self.line is not None
        self._selector = selector
        self.line.watch(selector, hear)
        selector.register(self._process.exit, EVENT_READ, look)

    def post_with(self, changes: ModelChanges, request: messages.ForModel, *fds: int) -> None:
        """Send a request, with user code's changes unless the worker knows them."""
        if changes.number != self._sent_changes:
            self._sent_changes = changes.number
            request.model_changes = changes.to_json()
        if (shared := changes.shared).number != self._shared:
            segment = shared.tensors.segment if shared.stored != self._stored else None
            self._shared, self._stored = shared.number, shared.stored
            request.shared = shared.to_json(stored=segment is not None)
            if segment is not None:
                fds = (segment.fd, *fds)
        self.post(request, *fds)

    def post(self, message: messages.WorkerMessage, *fds: int) -> None:
        """Send a message, now or later. Does not block: the worker may be stopped."""
        assert self.line is not None
        self.line.post(message, *fds)

    def flush(self) -> None:
        """Send unsent messages, as far as the worker takes them. Does not block."""
        if self.line is not None:
            self.line.flush()

    def arrived(self) -> Sequence[messages.WorkerMessage]:
        """Return all arrived messages. Does not block."""
        return [] if self.line is None else self.line.arrived()

    @property
    def is_cut(self) -> bool:
        """True if nothing more will come."""
        return self._is_cut if self.line is None else self.line.is_cut

    def cancel(self, ticket: int) -> None:
        """Report a cancelled shard, if the worker does not see the coordinator's arena."""

    @property
    def pid(self) -> int | None:
        """The id of the process; None before the fork, and for a process of another host."""
        return self._process.pid

    def has_ended(self) -> bool:
        """Return whether the process is gone. Does not block."""
        return self._process.has_ended()

    def wait(self, timeout_s: float) -> bool:
        """Return whether the process ends in time. Blocks."""
        return self._process.wait(timeout_s) is not None

    def kill(self) -> None:
        """Send signal 9. Does not block; the process may still finish a system call."""
        self._process.kill()

    def ending(self) -> Ending:
        """Return how the process ended, after the end."""
        code = self._process.wait()
        assert code is not None
        return Ending(code, self._process.error, self._tail())

    def close(self) -> None:
        """Kill a living process, wait for the exit, and close everything of the process.

        Blocks for at most ``KILLED_EXIT_S``: a process hung in the kernel (on a network disk,
        say) ends when the kernel returns, and runs no code until then.
        """
        assert self.line is not None
        if self._selector is not None:
            self._selector.unregister(self._process.exit)
        self._end_process()
        self.line.close()
        self._output.close()

    def _end_process(self) -> None:
        self._process.kill()
        self._process.wait(KILLED_EXIT_S)
        self._process.close()

    def _tail(self) -> str:
        """Return the end of the script's output."""
        self._output.seek(0)
        text = self._output.read().decode(errors="replace").strip()
        return text[-_TAIL:] or "it printed nothing"


@dataclass(frozen=True)
class ElasticSize:
    """The size of a group of workers: begins with a few, and takes the rest as they come."""

    least: int  # how many workers a run begins with
    room: str  # what the rest waits for, in words: "the Ray cluster has room for CPU=1"


class WorkerPool(Protocol):
    """A starter of workers' processes."""

    takes_runs: bool  # whether ``Compute`` may have several shards
    elastic: ElasticSize | None  # of a growing group; None: all workers are started at once

    @property
    def servers(self) -> Servers | None:
        """The servers with the parameters; None: the coordinator has the parameters."""

    def start(self, number: int) -> WorkerHandle:
        """Ask for a worker's process. The process may come later. Does not block for long.

        Raises:
            OSError: the process cannot be started.
        """

    def flush(self) -> None:
        """Pass on delayed requests. Does not block.

        Raises:
            ServerError: a server is gone.
        """

    def close(self) -> None:
        """Free everything common to the processes, all of which have ended."""


class LocalPool(ProcessStarter):
    """Processes of this machine, which share the coordinator's memory.

    Raises:
        UserError: there are too few descriptors.
    """

    servers = None
    takes_runs = True
    elastic: ElasticSize | None = None

    def __init__(self, script: Script, workers: int, *, threads: int) -> None:
        require_for_workers(workers)
        super().__init__(script, workers, threads=threads)

    def start(self, number: int) -> WorkerHandle:
        """Start a process; the fork may come later. Does not block for long."""
        handle = WorkerHandle(number)
        handle.begin(self)
        return handle
