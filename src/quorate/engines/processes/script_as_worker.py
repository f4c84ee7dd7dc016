"""The script in a worker: run without input, up to the first training loop.

Workers run the same script as the script's own process, with the same ``input()`` and the same
``open("train.log", "w")``. At the start the own process tells each worker whether input exists, and
the files open for writing.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from quorate.engines import worker_role
from quorate.engines.processes.script import Script
from quorate.engines.processes.worker_messages import OwnProcess, ScriptRaised, ScriptRefused
from quorate.engines.users_line import line_of_caller, line_of_error
from quorate.errors import InputError, UserError, WorkerError
from quorate.machine.standard_streams import flush_standard_streams

_TAIL_BYTES = 2000
_MOST_FILES = 256  # that are sent to workers

_FileIdentity = tuple[int, int]  # device and inode: a file has several names


def run_script(
    script: Script, own: OwnProcess, send: Callable[[ScriptRefused | ScriptRaised], None]
) -> None:
    """Run a script as a worker. Raises the script's exception, after a message about it.

    Args:
        script: to be run.
        own: ``facts_of_own_process`` of the coordinator.
        send: sends a message to the coordinator.
    """
    worker_role.become_worker()
    if own.has_input:
        sys.stdin = NoInput()
    _watch_files({*own.writes})
    try:
        script.run()
    except UserError as error:
        send(ScriptRefused(str(error)))
        raise
    except Exception as error:  # user code: reported once for all workers
        send(ScriptRaised(error, line_of_error(error), _printed()))
        raise


def _printed() -> str:
    """Return the end of the script's output, as far as the output is a file."""
    with suppress(OSError, ValueError):  # in an actor of Ray the output is no file
        flush_standard_streams()
        size = os.fstat(1).st_size
        return os.pread(1, _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace").strip()
    return ""


# --- input ----------------------------------------------------------------------------------------


class NoInput(io.TextIOBase):
    """Standard input of a worker: open, no terminal, and every read raises an error.

    Empty input would be wrong: a script that reads data from standard input would have different
    data in workers, and ``input()`` would raise an error without an explanation.
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
        """Raise: a script takes the buffer to read."""
        self._refuse()

    def readable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of /dev/null."""
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


def facts_of_own_process() -> OwnProcess:
    """Return facts of the script's own process for workers."""
    return OwnProcess(_has_input(), sorted({*_written_files()})[:_MOST_FILES])


def _has_input() -> bool:
    """Return whether standard input may have data: not closed, and not /dev/null."""
    try:
        return os.fstat(0).st_rdev != os.stat(os.devnull).st_rdev  # noqa: PTH116
    except OSError:
        return False


def _written_files() -> Iterator[_FileIdentity]:
    """Yield the regular files open for writing; no files on a system without /proc."""
    with suppress(OSError):
        for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208
            with suppress(OSError, ValueError, StopIteration):  # closed after the listing
                status = os.stat(f"/proc/self/fd/{entry}")  # noqa: PTH116
                if stat.S_ISREG(status.st_mode) and status.st_nlink and _is_written(entry):
                    yield status.st_dev, status.st_ino


def _is_written(descriptor: str) -> bool:
    with open(f"/proc/self/fdinfo/{descriptor}") as file:
        flags = next(line for line in file if line.startswith("flags:"))
    return int(flags.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY


# --- files that the script's own process is writing, and a worker opens for writing too -----------

# A worker that opens the script's log with "w" empties the log while the own process writes. Python
# reports the opening of a file just before (an audit hook). Only an exception could prevent the
# opening, and would end scripts that work well otherwise. So the user gets a warning.

_watched: Collection[_FileIdentity] = ()  # empty: the hook, installed for ever, does nothing
_warnings: list[str] = []


def _watch_files(files: Collection[_FileIdentity]) -> None:
    """Note openings of these files for writing from now on."""
    global _watched
    if files:
        _watched = files
        sys.addaudithook(_hear)


def warnings_of_script() -> list[str]:
    """Return a line for each opened file, and stop the watch."""
    global _watched
    _watched = ()
    lines = list(dict.fromkeys(_warnings))
    _warnings.clear()
    return lines


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    """Note an opening. Python calls this for every audit event, very often."""
    if not _watched or event != "open":
        return
    path, _, flags = arguments
    if not isinstance(flags, int) or flags & os.O_ACCMODE == os.O_RDONLY:
        return
    if not isinstance(path, str | bytes | os.PathLike):
        return  # a descriptor
    with suppress(OSError, ValueError):  # the file is new
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
class ScriptException:
    """An exception of the script in a worker, before the training loop."""

    error: BaseException  # to be raised again
    text: str  # "ValueError: no such file (train.py:12)"


def raised_in(worker: int, message: ScriptRaised) -> ScriptException:
    """Return the exception of a worker's message."""
    error = message.error
    # The text of a WorkerError begins with the name of the original type.
    named = "" if isinstance(error, WorkerError) else type(error).__name__
    said = (str(error).splitlines() or [""])[0]
    text = f"{': '.join(part for part in (named, said) if part)} ({message.line})"
    if printed := message.printed:
        error.add_note(f"quorate: before that it had printed: {printed}")
    error.add_note(
        f"quorate: worker {worker} raised it, which runs the script up to fit(); the script's own "
        "process did not. What is to be done once belongs where quorate.is_worker() is False"
    )
    return ScriptException(error, text)
