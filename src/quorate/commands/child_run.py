"""A child run: ``quorate run`` in a separate process, for commands that examine several runs.

The run dies with this process. Ctrl-C and SIGTERM end the run together with the command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO, Any

from quorate.commands.options import as_typed
from quorate.machine.environment import child_environment

GRACE_S = 5.0  # grace period of a program after its task is done or a request to end
LOOK_EVERY_S = 0.05
NO_SAVES_S = 1e9


def child_run(
    options: Mapping[str, Any],
    script: str,
    module: str | None,
    arguments: Sequence[str],
    output: IO[bytes],
    is_done: Callable[[], bool],
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run a script to its end, and return its exit code, -n after signal n. Blocks.

    Args:
        options: options of ``quorate run``, by name, as in ``memory_fraction``; None: not given.
        script: the script, as typed by a user.
        module: a module in the place of the script; None: there is none.
        arguments: arguments of the script.
        output: file for all output of the run.
        is_done: returns whether the run has done its task. A run that continues afterwards is
            terminated, then killed; so is the run if ``is_done`` raises.
        environment: changes of the environment.

    Raises:
        OSError: no process can be started.
    """
    # -P: otherwise Python would search the current folder for modules before all others.
    command = [sys.executable, "-P", "-m", "quorate", "run", "--dies-with", str(os.getpid())]
    command += as_typed(options)
    # After "--", even words with the names of our options belong to the script.
    command += ["--", script] if module is None else ["-m", module, "--"]
    # In a separate session: a terminal's Ctrl-C reaches only this process, which ends the run.
    process = subprocess.Popen(
        [*command, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=child_environment({}, environment),
        start_new_session=True,
    )
    done_at: float | None = None
    try:
        while process.poll() is None:
            if done_at is None and is_done():
                done_at = time.monotonic()
            if done_at is not None and time.monotonic() - done_at > GRACE_S:
                break
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_EVERY_S)
    finally:
        _end(process)
    return process.wait()


def last_error(output: str) -> str:
    """Return the line with the error in a program's output.

    After a traceback, the line of the exception; notes and output of other code may follow it.
    """
    lines = [line for line in output.splitlines() if line.strip()]
    starts = [n for n, line in enumerate(lines) if line.startswith("Traceback (most recent call")]
    after = lines[starts[-1] + 1 :] if starts else []
    # Skip lines with markers below a line of code, which may begin in any column.
    ends = (line for line in after if not line.startswith((" ", "\t")) and line.strip("^~"))
    raised = next(ends, None)
    error = raised or (lines[-1] if lines else "it printed nothing")
    return error.removeprefix("quorate: ").strip()


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """End the program by SIGTERM within the block like by Ctrl-C: together with the current run."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave no process of a run behind: workers die with the coordinator."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    # The process group contains the other processes started by the script.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
