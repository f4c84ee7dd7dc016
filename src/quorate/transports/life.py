"""One life of a worker: a process, from its start to its exit, and what belongs to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from typing import IO

from quorate import lifeline
from quorate.script import Script
from quorate.settings import child_environment
from quorate.transports import worker as worker_module
from quorate.wire import Wire


class Life:
    """A worker's process. ``close`` when it has ended, or to end it.

    Args:
        number: of the worker.
        script: what it runs.
        spins: whether its threads may spin while they wait for work.

    Raises:
        OSError: it cannot be started; nothing is left of it.
    """

    def __init__(self, number: int, script: Script, *, spins: bool) -> None:
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
            self.popen = _start(script, theirs, self.output, spins=spins)
        except BaseException:
            self.wire.close()
            self.output.close()
            raise
        finally:
            theirs.close()
        self.wire.send({"number": number, "script": asdict(script)})
        self.exit = _exit_of(self.popen)  # readable when it has ended; None where there is no such

    def kill(self, reason: str) -> None:
        self.kill_reason = reason
        self.popen.kill()

    def how_it_ended(self) -> tuple[str, bool]:
        """What to say of it, and whether it was killed from outside. It must have ended."""
        code = self.popen.wait()
        if self.unfit is not None:
            return self.unfit, False
        if self.kill_reason is not None:
            return self.kill_reason, False
        said = f"ended with exit code {code}"
        if code < 0:
            said = f"was killed by signal {-code}{_name(-code)}"
        if code >= 0 and not self.joined:
            said += f" while starting: {self._tail()}"
        # By an operator, or by the kernel when memory runs out; other signals are its own doing.
        return said, code == -signal.SIGKILL

    def close(self) -> None:
        """Kill it if it lives, wait for its exit, and close what belonged to it."""
        self.popen.kill()
        self.popen.wait()
        self.wire.close()
        self.output.close()
        if self.exit is not None:
            os.close(self.exit)
            self.exit = None

    def _tail(self, most: int = 2000) -> str:
        """The end of what the script printed."""
        self.output.seek(0)
        text = self.output.read().decode(errors="replace").strip()
        return text[-most:] or "it printed nothing"


def _start(
    script: Script, wire: Wire, output: IO[bytes], *, spins: bool
) -> subprocess.Popen[bytes]:
    fds = {"wire": wire.socket.fileno(), "output": output.fileno()}
    return subprocess.Popen(
        [
            sys.executable,
            *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
            lifeline.__file__,
            str(os.getpid()),
            worker_module.__name__,
            json.dumps([place for place in sys.path if isinstance(place, str)]),
            json.dumps(fds),
        ],
        stdin=subprocess.DEVNULL,
        pass_fds=list(fds.values()),
        cwd=script.folder,
        env=child_environment({} if spins else {"OMP_WAIT_POLICY": "passive"}),
        process_group=0,  # a terminal's Ctrl-C is the coordinator's
    )


def _exit_of(popen: subprocess.Popen[bytes]) -> int | None:
    """A descriptor that becomes readable at the process's exit.

    Its wire tells of it too, unless the process has children that inherited it.
    """
    try:
        return os.pidfd_open(popen.pid)
    except (AttributeError, OSError):  # another system, an old kernel, a sandbox
        return None


def _name(number: int) -> str:
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:
        return ""
