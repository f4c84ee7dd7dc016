"""The status of a run: ``status.json`` in its directory, with the state and the end of the run.

The file is written when a run begins and when a run ends. After a kill the file still says
"running", with the process: a reader checks whether the process exists. The file serves people and
tools; no run depends on it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
import psutil

from quorate.errors import UserError
from quorate.machine import this_host
from quorate.machine.atomic_file import write_atomically
from quorate.machine.regular_file import read_regular
from quorate.machine.text import printable
from quorate.services.checkpoints.record import Count, Moment, Pid

NAME = "status.json"
MOST_BYTES = 1 << 16
MOST_REASON = 500  # characters
MOST_SCRIPT = 4096
BORN_WITHIN_S = 1.0  # greatest difference between two readings of a process's start time

RUNNING, FINISHED, STOPPED, FAILED = "running", "finished", "stopped", "failed"
KILLED = "killed"  # the status says running, and the process is gone
ELSEWHERE = "elsewhere"  # the status says running, on a host or in a container invisible from here


class Status(msgspec.Struct, kw_only=True):
    """The known status of a run, and the schema of status.json."""

    # As read by ``status_of``, also "killed" or "elsewhere", which are never written.
    state: Annotated[str, msgspec.Meta(pattern=r"\A(running|finished|stopped|failed)\Z")]
    at: Moment  # time of writing
    global_step: Count
    last_step: Count  # number of updates at the end of the run
    reason: str  # why the run ended; or where the run is, if elsewhere; else empty
    script: str | None = None  # path of the script; None: typed code, or unknown
    pid: Pid
    born: Moment | None  # start of the process; None: unknown
    host: str
    mark: str  # of the host or container, see ``this_host``


class RunStatus:
    """The writer of a run's status. Failures are ignored: training does not depend on the file.

    Args:
        run_dir: the run directory; None: nothing is written.
        last_step: updates at the end of the run.
        renew: ``RunLock.renew``, called before every write.
    """

    def __init__(self, run_dir: Path | None, last_step: int, renew: Callable[[], None]) -> None:
        self._path = None if run_dir is None else run_dir / NAME
        self._renew = renew
        self._last_step = last_step

    def begun(self, global_step: int) -> None:
        """Write that the run is in progress."""
        self._write(RUNNING, global_step, "")

    def ended(
        self, global_step: int, reason: str | None, raised: BaseException | None
    ) -> tuple[str, str]:
        """Write that the run is over, and return the state in which the run ends, and why.

        Args:
            reason: the source of a stop request, if there was one.
            raised: the exception that ended the run, if any.
        """
        state, why = FINISHED, reason or "all steps are done"
        if isinstance(raised, Exception):
            state, why = FAILED, f"{type(raised).__name__}: {raised}"
        elif raised is not None or global_step < self._last_step:  # a second Ctrl-C, sys.exit()
            state, why = STOPPED, reason or type(raised).__name__
        self._write(state, global_step, why)
        return state, why

    def _write(self, state: str, global_step: int, reason: str) -> None:
        if self._path is None:
            return
        status = Status(
            state=state,
            at=time.time(),
            global_step=global_step,
            last_step=self._last_step,
            reason=printable(reason, MOST_REASON),
            script=_script(),
            pid=os.getpid(),
            born=_born(os.getpid()),
            host=this_host.name(),
            mark=this_host.mark(),
        )
        with suppress(OSError, UserError):  # UserError: the directory belongs to another run now
            self._renew()
            write_atomically(self._path, json.dumps(msgspec.structs.asdict(status)) + "\n")


def status_of(run_dir: Path) -> Status | None:
    """Return the status of a run; None without a valid status.json of quorate."""
    try:
        status = msgspec.json.decode(read_regular(run_dir / NAME, MOST_BYTES), type=Status)
    except (OSError, ValueError, RecursionError):
        return None
    status.reason = printable(status.reason, MOST_REASON)
    status.script = None if status.script is None else printable(status.script, MOST_SCRIPT)
    if status.state == RUNNING:
        status.state, status.reason = _looked_for(status)
    return status


def _script() -> str | None:
    """Return the path of this process's script; None without one, as in a notebook."""
    path = sys.argv[0] if sys.argv else ""
    # Not ``Path.is_file``: it raises if the user may not enter the folder.
    return os.path.abspath(path) if os.path.isfile(path) else None  # noqa: PTH100, PTH113


def _looked_for(status: Status) -> tuple[str, str]:
    """Return the actual state of a run marked as running, and the place of a run elsewhere."""
    if status.mark != this_host.mark():
        return ELSEWHERE, f"process {status.pid} on {printable(status.host, 80)}"
    if this_host.has_ended(status.pid):
        return KILLED, ""
    born = _born(status.pid)
    if status.born is None or born is None or abs(status.born - born) <= BORN_WITHIN_S:
        return RUNNING, ""
    return KILLED, ""  # another process has the number


def _born(pid: int) -> float | None:
    """Return the start time of a process, in seconds since the epoch; None if unknown."""
    try:
        return float(psutil.Process(pid).create_time())
    except (psutil.Error, OSError):
        return None
