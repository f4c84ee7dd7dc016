"""A worker's process, from its start to its exit, and what belongs to it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict
from selectors import EVENT_READ, BaseSelector
from typing import IO

from quorate.engines.collective.place import Place
from quorate.engines.processes.endings import Ending
from quorate.engines.processes.pool import WorkerHandle
from quorate.engines.processes.process_start import Starter, new_starter
from quorate.engines.processes.script import Script
from quorate.engines.processes.script_as_worker import facts_of_own_process
from quorate.engines.processes.wire import Message, WatchedWire, Wire
from quorate.machine.descriptors import require_for_workers
from quorate.machine.limits import KILLED_EXIT_S

_TAIL = 2000  # characters of its output that are shown


class WorkerProcess(WorkerHandle):
    """A worker's process on this machine. ``close`` it when it has ended, or to end it.

    Args:
        number: of the worker.
        script: what it runs.
        starter: starts it.
        place: in a collective, if it is to be a rank.

    Raises:
        OSError: it cannot be started; nothing is left of it.
    """

    def __init__(
        self, number: int, script: Script, starter: Starter, *, place: Place | None = None
    ) -> None:
        super().__init__(number)
        self._selector: BaseSelector | None = None
        with ExitStack() as undo:
            # What the script prints up to its training loop.
            self._output: IO[bytes] = undo.enter_context(tempfile.TemporaryFile())
            self.wire, theirs = Wire.pair()
            self._line = undo.enter_context(closing(WatchedWire(self.wire)))
            with closing(theirs):
                self._process = starter.start(theirs, self._output)
            undo.callback(self._end_process)
            given = None if place is None else asdict(place)
            told = {"number": number, "script": asdict(script), "place": given}
            self.post({**told, "own": facts_of_own_process()})
            undo.pop_all()

    def watch(
        self, selector: BaseSelector, hear: Callable[[], None], look: Callable[[], None]
    ) -> None:
        """Have a selector tell when it was heard from, or takes what waits, and when it ended."""
        self._selector = selector
        self._line.watch(selector, hear)
        if self.exit is not None:
            selector.register(self.exit, EVENT_READ, look)

    def deaf(self) -> None:
        """Look at its wire no more: it is cut, or handed over."""
        self._line.deaf()

    def post(self, message: Message, *fds: int) -> None:
        """Send it a message, now or when it takes it. Does not block: it may be stopped."""
        self._line.post(message, *fds)

    def cancel(self, ticket: int) -> None:
        """Do nothing: it looks into the arena itself."""

    def flush(self) -> None:
        """Send what waits, as far as it takes it. Does not block."""
        self._line.flush()

    def arrived(self) -> list[Message]:
        """Return all messages that are here. Does not block."""
        return self.wire.arrived()

    @property
    def is_cut(self) -> bool:
        """Whether nothing more will come from it."""
        return self.wire.is_cut

    def _withdraw(self, **named: object) -> bool:
        return self.wire.withdraw(**named)

    @property
    def pid(self) -> int | None:
        """The number of its process; None as long as it is not forked."""
        return self._process.pid

    @property
    def exit(self) -> int | None:
        """A descriptor, readable when ``has_ended`` knows more; None where there is no such."""
        return self._process.exit

    @property
    def tells_exit(self) -> bool:
        """Whether there is such a descriptor."""
        return self.exit is not None

    def has_ended(self) -> bool:
        """Return whether it is gone. Does not block."""
        return self._process.has_ended()

    def wait(self, timeout_s: float) -> bool:
        """Return whether it ends in time. Blocks."""
        return self._process.wait(timeout_s) is not None

    def kill(self) -> None:
        """Send it signal 9. Does not block; what it does until then is done."""
        self._process.kill()

    def ending(self) -> Ending:
        """Return how it ended. It must have ended."""
        code = self._process.wait()
        assert code is not None
        return Ending(code, self._process.error, self._tail())

    def close(self) -> None:
        """Kill it if it lives, wait for its exit, and close what belonged to it.

        Blocks for at most ``KILLED_EXIT_S``: a process that hangs in the kernel (on a disk of the
        network that does not answer, say) ends when the kernel lets it, and runs no code until
        then.
        """
        if self._selector is not None and self.exit is not None:
            self._selector.unregister(self.exit)
        self._end_process()
        self._line.close()
        self._output.close()

    def _end_process(self) -> None:
        self._process.kill()
        self._process.wait(KILLED_EXIT_S)
        self._process.close()

    def _tail(self) -> str:
        """Return the end of what the script printed."""
        self._output.seek(0)
        text = self._output.read().decode(errors="replace").strip()
        return text[-_TAIL:] or "it printed nothing"


class LocalPool:
    """The site of processes of this machine, in memory that the coordinator shares with them.

    Args:
        script: what they run.
        workers: how many.
        threads: intra-op threads of each.

    Raises:
        UserError: there are too few descriptors.
    """

    servers = None
    takes_runs = True

    def __init__(self, script: Script, workers: int, threads: int) -> None:
        require_for_workers(workers)
        self._script = script
        self._starter = new_starter(script, workers, threads=threads)

    def start(self, number: int) -> WorkerProcess:
        """Start a process; it may be forked later. Does not block for long."""
        return WorkerProcess(number, self._script, self._starter)

    def flush(self) -> None:
        """Ask for the forks that there was no room to be asked for. Does not block."""
        self._starter.flush()

    def close(self) -> None:
        """End the fork server."""
        self._starter.close()
