"""What a script raised in a worker before its training loop: sent there, and told here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from quorate.engines import remote_error
from quorate.engines.as_worker.users_line import line_of_error
from quorate.errors import WorkerError
from quorate.machine.standard_streams import flush_standard_streams

RAISED = "raised"  # the kind of a worker's message
_TAIL_BYTES = 2000


@dataclass(frozen=True)
class Raised:
    """An exception of the script's, as a worker ran it."""

    error: BaseException  # to be raised again
    text: str  # "ValueError: no such file (train.py:12)"


def message_of(error: Exception) -> dict[str, Any]:
    """Return the message by which a worker tells of it."""
    return {
        "kind": RAISED,
        "error": remote_error.to_json(error),
        "line": line_of_error(error),
        "printed": _printed(),
    }


def _printed() -> str:
    """Return the end of what the script has printed: up to its loop that goes to a file."""
    with suppress(OSError, ValueError):  # or elsewhere, in an actor
        flush_standard_streams()
        size = os.fstat(1).st_size
        return os.pread(1, _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace").strip()
    return ""


def raised_in(worker: int, message: Mapping[str, Any]) -> Raised:
    """Return what a worker has told."""
    error = remote_error.from_json(message["error"])
    named = "" if isinstance(error, WorkerError) else type(error).__name__  # else its text does
    said = (str(error).splitlines() or [""])[0]
    text = f"{': '.join(part for part in (named, said) if part)} ({message['line']})"
    if printed := message["printed"]:
        error.add_note(f"quorate: before that it had printed: {printed}")
    error.add_note(
        f"quorate: worker {worker} raised it, which runs the script up to fit(); the script's own "
        "process did not. What is to be done once belongs where quorate.is_worker() is False"
    )
    return Raised(error, text)
