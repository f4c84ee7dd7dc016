"""A worker's process, from its start to its exit, and what belongs to it."""

from __future__ import annotations

import signal
import tempfile
import time
from dataclasses import asdict
from typing import IO

from quorate.transports.processes.script import Script
from quorate.transports.processes.starter import Starter
from quorate.transports.processes.wire import Wire


class WorkerProcess:
    """A worker's process. ``close`` when it has ended, or to end it.

    Args:
        number: of the worker.
        script: what it runs.
        starter: start its process.

    Raises:
        OSError: it cannot be started; nothing is left of it.
    """

    def __init__(self, number: int, script: Script, starter: Starter) -> None:
        self.number = number
        self.started_at = time.monotonic()
        self.is_here = False  # it has reached the training loop
        self.is_deaf_since: float | None = None  # its wire is cut, and it has not ended
        self.asked: dict[int, float] = {}  # jobs it was asked to join, and when
        self.joined: set[int] = set()  # jobs
        self.checked: set[str] = set()  # datasets that are the coordinator's
        self.kill_reason: str | None = None  # why the coordinator kills it
        self.unfit: str | None = None  # why it cannot take part
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  before the loop
        self.wire, theirs = Wire.pair()
        try:
            self._process = starter.start(theirs, self.output)
        except BaseException:
            self.wire.close()
            self.output.close()
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
        return self._process.has_ended()

    def wait(self, timeout_s: float) -> bool:
        """Whether it ends in time. Blocks."""
        return self._process.wait(timeout_s) is not None

    def kill(self, reason: str) -> None:
        self.kill_reason = reason
        self._process.kill()

    def how_it_ended(self) -> tuple[str, bool]:
        """What to say of it, and whether it was killed from outside. It must have ended."""
        code = self._process.wait()
        assert code is not None
        if self.unfit is not None:
            return self.unfit, False
        if self.kill_reason is not None:
            return self.kill_reason, False
        if self._process.error is not None:
            return f"cannot be started: {self._process.error}", False
        said = f"ended with exit code {code}"
        if code < 0:
            said = f"was killed by signal {-code}{_name(-code)}"
        if code >= 0 and not self.joined:
            said += f" while starting: {self._tail()}"
        # By an operator, or by the kernel when memory runs out; other signals are its own doing.
        return said, code == -signal.SIGKILL

    def close(self) -> None:
        """Kill it if it lives, wait for its exit, and close what belonged to it."""
        self._process.kill()
        self._process.wait()
        self._process.close()
        self.wire.close()
        self.output.close()

    def _tail(self, most: int = 2000) -> str:
        """The end of what the script printed."""
        self.output.seek(0)
        text = self.output.read().decode(errors="replace").strip()
        return text[-most:] or "it printed nothing"


def _name(number: int) -> str:
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:
        return ""
