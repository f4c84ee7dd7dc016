"""Events of a run: lines for the user, with a kind and a worker.

A ``RunEvent`` is a ``str``: functions for lines take events unchanged. The log of events
(``services/run_directory/logs.py``) reads the kind and the worker. A plain ``str`` counts as a
warning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

START = "start"  # training starts
RESUME = "resume"  # training continues from a checkpoint
LOST = "lost"  # a worker was killed, crashed, or did not answer
BACK = "back"  # another process has taken the place of a lost worker
JOINED = "joined"  # a worker joined after the start
TAKEOVER = "takeover"  # a worker computes a shard that another worker had
SLOW = "slow"  # a worker is slow, or no longer slow
SAVE = "save"  # a checkpoint was written
EVALUATION = "evaluation"  # the validation set was evaluated
WARNING = "warning"
NOTE = "note"  # information that needs no action
END = "end"  # training ended


class RunEvent(str):
    """A line about a run.

    Args:
        text: the line.
        kind: a constant of this module.
        worker: the number of the worker concerned, if any.
        is_shown: whether the user sees the line. Every event is logged.
    """

    kind: str
    worker: int | None
    is_shown: bool

    def __new__(
        cls, text: str, kind: str, worker: int | None = None, *, is_shown: bool = True
    ) -> RunEvent:
        """Make an event of a text."""
        event = super().__new__(cls, text)
        event.kind, event.worker, event.is_shown = kind, worker, is_shown
        return event

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the parts of a copy."""
        return RunEvent, (str(self), self.kind, self.worker), self.__dict__


def as_note(line: str) -> RunEvent:
    """Return an event unchanged, and a plain line as a note."""
    return line if isinstance(line, RunEvent) else RunEvent(line, NOTE)


def hidden(line: str) -> RunEvent:
    """Return the event of a line for the log alone, not for the user."""
    event = line if isinstance(line, RunEvent) else RunEvent(line, WARNING)
    return RunEvent(str(event), event.kind, event.worker, is_shown=False)


def is_shown(line: str) -> bool:
    """Return whether the user sees a line."""
    return not isinstance(line, RunEvent) or line.is_shown


def showing(say: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function to pass on the lines for the user."""

    def say_shown(line: str) -> None:
        if is_shown(line):
            say(line)

    return say_shown
