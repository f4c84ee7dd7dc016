"""Marks: events with their place on the time axis, numbered as the page lists them."""

from __future__ import annotations

from typing import NamedTuple

from quorate.commands.report.run_history import RunHistory
from quorate.commands.report.sessions import Sessions
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
from quorate.services.run_status import KILLED

SESSION = "session"  # the start of a fit that is resumed a little later
CUT = "cut"  # a fit that ended without an event: its process was killed

# Lanes of the strip of events, from top to bottom, and which kinds of events are in each.
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

    number: int  # in the list of all events of the page
    x: float  # training time, in seconds
    at: float  # seconds since the epoch
    global_step: int
    kind: str
    text: str

    @property
    def name(self) -> str:
        """What the page calls the kind."""
        return NAMES.get(self.kind, self.kind)


def marks(history: RunHistory, found: Sessions) -> list[Mark]:
    """Return all events of a run, and where fits were killed, in order."""
    listed: list[Mark] = []
    for place, session in enumerate(found.listed):
        step = 0
        is_resumed = any(event.kind == RESUME for event in session.events)
        saved = ""
        for event in session.events:
            if event.kind == SAVE and event.text == saved:
                continue  # a checkpoint that was due for two reasons is written twice
            saved = event.text if event.kind == SAVE else saved
            x = session.place(event.at)
            # Of a fit that was resumed, the charts show the resume alone.
            kind = SESSION if event.kind == START and is_resumed else event.kind
            step = max(step, event.global_step)
            listed.append(Mark(len(listed), x, event.at, event.global_step, kind, event.text))
        is_last = place == len(found.listed) - 1
        is_killed = session.state is None and (not is_last or history.facts.state == KILLED)
        if is_killed and history.events:
            rows = history.updates.steps[session.first_row : session.end_row]
            step = max([step, *rows[-1:]])
            text = "last sign of the run's process before the run was killed"
            x = session.offset + session.seconds
            listed.append(Mark(len(listed), x, session.end, step, CUT, text))
    return listed


def lost_workers(history: RunHistory) -> dict[int, int]:
    """Return how often each worker was lost."""
    counts: dict[int, int] = {}
    for event in history.events:
        if event.kind == LOST and event.worker is not None:
            counts[event.worker] = counts.get(event.worker, 0) + 1
    return counts
