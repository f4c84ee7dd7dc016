"""A worker's process, from its start to its exit, and what belongs to it."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from typing import IO

from quorate.transports.processes.ending import Ending
from quorate.transports.processes.script import Script
from quorate.transports.processes.starter import Starter
from quorate.transports.processes.wire import Wire

_TAIL = 2000  # characters of its output that are shown


class WorkerProcess:
    """A worker's process. ``close`` it when it has ended, or to end it.

    Args:
        number: of the worker.
        script: what it runs.
        starter: starts it.

    Raises:
        OSError: it cannot be started; nothing is left of it.
    """

    def __init__(self, number: int, script: Script, starter: Starter) -> None:
        self.agreed: set[str] = set()  # what is known to be the coordinator's: see Agreement
        self.amended = 0  # the number of the newest ``Amendments`` that it has
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  up to the training loop
        self.wire, theirs = Wire.pair()
        try:
            self._process = starter.start(theirs, self._output)
        except BaseException:
            self.wire.close()
            self._output.close()
            raise
        finally:
            theirs.close()
        self.wire.send({"number": number, "script": asdict(script)})

    @property
    def pid(self) -> int | None:
        """The number of its process; None as long as it is not forked."""
        return self._process.pid

    @property
    def exit(self) -> int | None:
        """A descriptor, readable when ``has_ended`` knows more; None where there is no such."""
        return self._process.exit

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
        """Kill it if it lives, wait for its exit, and close what belonged to it."""
        self._process.kill()
        self._process.wait()
        self._process.close()
        self.wire.close()
        self._output.close()

    def _tail(self) -> str:
        """Return the end of what the script printed."""
        self._output.seek(0)
        text = self._output.read().decode(errors="replace").strip()
        return text[-_TAIL:] or "it printed nothing"
