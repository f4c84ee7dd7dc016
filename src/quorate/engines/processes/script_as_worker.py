"""The script as a worker runs it: without input, up to the first training loop.

Workers run the same script as the script's own process, so that they come to the same ``input()``
and to the same ``open("train.log", "w")``. The own process tells each worker at the start whether
there is input, and which files are open for writing.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from quorate.engines import worker_role
from quorate.engines.processes.script import Script
from quorate.engines.users_line import line_of_caller, line_of_error
from quorate.errors import InputError, UserError, WorkerError
from quorate.machine.standard_streams import flush_standard_streams

RAISED = "raised"  # the kind of a worker's message
_TAIL_BYTES = 2000
_MOST_FILES = 256  # of which workers are told

_FileIdentity = tuple[int, int]  # device and inode: a file has several names


def run_script(
    script: Script, own: Mapping[str, Any], send: Callable[[dict[str, Any]], None]
) -> None:
    """Run a script as a worker. Raises the script's exception, after a message about it.

    Args:
        script: to be run.
        own: ``facts_of_own_process`` of the coordinator.
        send: sends a message to the coordinator.
    """
    worker_role.become_worker()
    if own["has_input"]:
        sys.stdin = NoInput()
    _watch_files({(device, inode) for device, inode in own["writes"]})
    try:
        script.run()
    except UserError as error:
        send({"kind": "refuses", "message": str(error)})
        raise
    except Exception as error:  # user code: reported once for all workers
        send(
            {
                "kind": RAISED,
                "error": error,
                "line": line_of_error(error),
                "printed": _printed(),
            }
        )
        raise


def _printed() -> str:
    """Return the end of the script's output, which goes to a file up to the training loop."""
    with suppress(OSError, ValueError):  # or elsewhere, in an actor
        flush_standard_streams()
        size = os.fstat(1).st_size
        return os.pread(1, _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace").strip()
    return ""


# --- input ----------------------------------------------------------------------------------------


class NoInput(io.TextIOBase):
    """Standard input of a worker: open, no terminal, and every read raises.

    Empty input would be believed: a script that takes data from there would make other data in
    workers, and ``input()`` would raise an error that nobody can explain.
    """

    encoding = "utf-8"

    def read(self, _size: int | None = -1) -> NoReturn:
        """Raise."""
        self._refuse()

    def readline(self, _size: int = -1) -> NoReturn:  # type: ignore[override]
        """Raise. Iteration, ``readlines`` and ``input()`` call this."""
        self._refuse()

    @property
    def buffer(self) -> Any:
        """Raise: nobody takes the buffer but to read."""
        self._refuse()

    def readable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor, which is of /dev/null."""
        return 0

    def _refuse(self) -> NoReturn:
        line = line_of_caller(sys._getframe(1))
        raise InputError(
            "stdin",
            f"{line} reads it in a worker process, which has none",
            fix="read it only where quorate.is_worker() is False, or take what the script "
            "needs from its arguments",
        )


# --- the script's own process ---------------------------------------------------------------------


def facts_of_own_process() -> dict[str, Any]:
    """Return, as JSON, what workers need to know of this process, the script's own."""
    return {"has_input": _has_input(), "writes": sorted({*_written_files()})[:_MOST_FILES]}


def _has_input() -> bool:
    """Return whether standard input may have something: not closed, and not /dev/null."""
    try:
        return os.fstat(0).st_rdev != os.stat(os.devnull).st_rdev  # noqa: PTH116
    except OSError:
        return False


def _written_files() -> Iterator[_FileIdentity]:
    """Yield the regular files that are open for writing; none where there is no /proc."""
    with suppress(OSError):
        for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208
            with suppress(OSError, ValueError, StopIteration):  # closed since: the listing's own
                status = os.stat(f"/proc/self/fd/{entry}")  # noqa: PTH116
                if stat.S_ISREG(status.st_mode) and status.st_nlink and _is_written(entry):
                    yield status.st_dev, status.st_ino


def _is_written(descriptor: str) -> bool:
    with open(f"/proc/self/fdinfo/{descriptor}") as file:
        flags = next(line for line in file if line.startswith("flags:"))
    return int(flags.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY


# --- files that the script's own process is writing, and a worker opens for writing too -----------

# A log that the script opens with "w" is emptied by the worker, under the hands of the writing
# process. Python announces an open file right before the opening (an audit hook), and nothing but
# an exception could prevent the opening, in a script that may be content. So there is a warning.

_watched: Collection[_FileIdentity] = ()  # empty: the hook, which stays for ever, does nothing
_warnings: list[str] = []


def _watch_files(files: Collection[_FileIdentity]) -> None:
    """From now on, note which of these files are opened for writing."""
    global _watched
    if files:
        _watched = files
        sys.addaudithook(_hear)


def warnings_of_script() -> list[str]:
    """Return a line for each watched file that was opened, and watch no more."""
    global _watched
    _watched = ()
    lines = list(dict.fromkeys(_warnings))
    _warnings.clear()
    return lines


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    """Note an opening. Called for every audit event, of which there are many."""
    if not _watched or event != "open":
        return
    path, _, flags = arguments
    if not isinstance(flags, int) or flags & os.O_ACCMODE == os.O_RDONLY:
        return
    if not isinstance(path, str | bytes | os.PathLike):
        return  # a descriptor
    with suppress(OSError, ValueError):  # there is no such file yet
        status = os.stat(path)  # noqa: PTH116
        if (status.st_dev, status.st_ino) in _watched:
            what = "empties" if flags & os.O_TRUNC else "writes to"
            line = line_of_caller(sys._getframe(1))
            _warnings.append(
                f"{os.fsdecode(path)}: each worker process {what} the file ({line}) while the main "
                "process has the file open for writing; open it only where quorate.is_worker() is "
                "False"
            )


# --- exceptions -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Raised:
    """An exception that the script raised in a worker."""

    error: BaseException  # to be raised again
    text: str  # "ValueError: no such file (train.py:12)"


def raised_in(worker: int, message: Mapping[str, Any]) -> Raised:
    """Return the exception of a worker's message."""
    error = message["error"]
    named = "" if isinstance(error, WorkerError) else type(error).__name__  # else the text does
    said = (str(error).splitlines() or [""])[0]
    text = f"{': '.join(part for part in (named, said) if part)} ({message['line']})"
    if printed := message["printed"]:
        error.add_note(f"quorate: before that it had printed: {printed}")
    error.add_note(
        f"quorate: worker {worker} raised it, which runs the script up to fit(); the script's own "
        "process did not. What is to be done once belongs where quorate.is_worker() is False"
    )
    return Raised(error, text)
