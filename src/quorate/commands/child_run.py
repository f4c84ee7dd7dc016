"""A child run: ``quorate run`` in a process of its own, for commands that look at several runs.

It dies with this process. Ctrl-C and SIGTERM end it with the command that started it.
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

GRACE_S = 5.0  # how long a program may take to end when it has done its part, or is told to end
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
        options: of ``quorate run``, by name, as in ``memory_fraction``; None: not given.
        script: as a user types it.
        module: in the place of the script; None: there is none.
        arguments: of the script.
        output: where all that it prints is written.
        is_done: whether it has done its part. If it goes on it is told to end, then killed; so it
            is where this raises.
        environment: what it has instead of this process's.

    Raises:
        OSError: no process can be started.
    """
    # -P: without it the folder one is in would be searched for modules before all others.
    command = [sys.executable, "-P", "-m", "quorate", "run", "--dies-with", str(os.getpid())]
    command += as_typed(options)
    # Behind -- also those that are named as ours are the script's.
    command += ["--", script] if module is None else ["-m", module, "--"]
    # In a session of its own: a terminal's Ctrl-C reaches this process alone, which ends the other.
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
    """Return the line of a program's output that says what went wrong.

    After a traceback that is the exception; notes and what others print may follow it.
    """
    lines = [line for line in output.splitlines() if line.strip()]
    starts = [n for n, line in enumerate(lines) if line.startswith("Traceback (most recent call")]
    after = lines[starts[-1] + 1 :] if starts else []
    # Markers below a line of code begin where they like.
    ends = (line for line in after if not line.startswith((" ", "\t")) and line.strip("^~"))
    raised = next(ends, None)
    error = raised or (lines[-1] if lines else "it printed nothing")
    return error.removeprefix("quorate: ").strip()


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """End the program by SIGTERM, within the block, as Ctrl-C does: with the run under way."""

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
    # What the script has started besides is in its group.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
