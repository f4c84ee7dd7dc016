"""Marks: events with their positions on the time axis, each with a key for a row on the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quorate.commands.report.run_history import RunHistory
from quorate.commands.report.sessions import FitSessions
from quorate.coordination.run_event import (
    BACK,
    END,
    EVALUATION,
    JOINED,
    LOST,
    NOTE,
    RESUME,
    SAVE,
    SLOW,
    START,
    TAKEOVER,
    WARNING,
)
from quorate.services.run_directory.status import KILLED

SESSION = "session"  # the start of a fit, with a resume a little later
CUT = "cut"  # a fit without an end event: its process was killed

# Events in a collapsed list of the page.
QUIET = (NOTE, EVALUATION, SLOW)
MOST_EVENTS = 400  # rows of a list: the first and the last

# Lanes of the strip of events, from top to bottom, with the kinds of events in each.
LANES = {
    "run": (START, RESUME, END, CUT),
    "workers": (LOST, BACK, JOINED),
    "takeovers": (TAKEOVER,),
    "saves": (SAVE,),
    "warnings": (WARNING, SLOW),
}
LANE_OF = {kind: lane for lane, kinds in LANES.items() for kind in kinds}

NAMES = {
    START: "start",
    SESSION: "start",
    RESUME: "resume",
    END: "end",
    CUT: "run killed",
    LOST: "worker lost",
    BACK: "worker restarted",
    JOINED: "worker joined",
    TAKEOVER: "takeover",
    SLOW: "slow worker",
    SAVE: "checkpoint saved",
    EVALUATION: "validation",
    WARNING: "warning",
    NOTE: "note",
}


class Mark(NamedTuple):
    """An event on the time axis."""

    key: str  # unique on the page
    x: float  # training time, in seconds
    at: float  # seconds since the epoch
    global_step: int
    kind: str
    text: str
    is_listed: bool = True  # whether the page has a row of the event

    @property
    def row(self) -> str | None:
        """The id of the row of the event, if the page has one."""
        return f"event-{self.key}" if self.is_listed else None

    @property
    def name(self) -> str:
        """The name of the kind on the page."""
        return NAMES.get(self.kind, self.kind)


def marks(history: RunHistory, found: FitSessions, letter: str = "") -> list[Mark]:
    """Return all events of a run, and the kills of its fits, in order.

    Args:
        letter: letter of the run, on a page of two runs.
    """
    listed: list[Mark] = []
    for place, session in enumerate(found.listed):
        step = 0
        is_resumed = any(event.kind == RESUME for event in session.events)
        saved = ""
        for event in session.events:
            if event.kind == SAVE and event.text == saved:
                continue  # a checkpoint due for two reasons is written twice
            saved = event.text if event.kind == SAVE else saved
            x = session.place(event.at)
            # For a resumed fit, the charts show only the resume.
            kind = SESSION if event.kind == START and is_resumed else event.kind
            step = max(step, event.global_step)
            listed.append(
                Mark(f"{letter}{len(listed)}", x, event.at, event.global_step, kind, event.text)
            )
        is_last = place == len(found.listed) - 1
        # A session of an older version of quorate has no events, and may have ended normally.
        is_over = not is_last or history.facts.state == KILLED
        if session.events and session.state is None and is_over:
            rows = history.updates.steps[session.first_row : session.end_row]
            step = max([step, *rows[-1:]])
            text = "last sign of the run's process before the run was killed"
            x = session.offset + session.seconds
            listed.append(Mark(f"{letter}{len(listed)}", x, session.end, step, CUT, text))
    keys = {mark.key for is_quiet in (True, False) for mark in _rows(listed, is_quiet=is_quiet)}
    return [mark._replace(is_listed=mark.key in keys) for mark in listed]


def _rows(listed: Sequence[Mark], *, is_quiet: bool) -> list[Mark]:
    of_list = [mark for mark in listed if (mark.kind in QUIET) == is_quiet]
    half = MOST_EVENTS // 2
    return of_list if len(of_list) <= MOST_EVENTS else [*of_list[:half], *of_list[-half:]]


def lost_workers(history: RunHistory) -> dict[int, int]:
    """Return the number of losses of each worker."""
    counts: dict[int, int] = {}
    for event in history.events:
        if event.kind == LOST and event.worker is not None:
            counts[event.worker] = counts.get(event.worker, 0) + 1
    return counts
