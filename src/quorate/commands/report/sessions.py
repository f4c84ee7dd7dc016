"""The sessions of a run on a common time axis: each fit, without the pauses between them.

The night between a kill in the evening and a resume in the morning is left out of the time axis:
training time is the sum of the sessions.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quorate.commands.report.run_history import EventLine, PhaseTimes, RunHistory, spent_at_end
from quorate.coordination.run_event import END, START

EARLY_S = 1.0  # a log may seem to begin so long before its fit, because of clocks

Floats = npt.NDArray[np.float64]


class FitSession(NamedTuple):
    """A fit of a run."""

    begin: float  # seconds since the epoch
    end: float  # time of the last sign
    offset: float  # seconds of training time before the session
    first_row: int  # index of the first update
    end_row: int  # index after the last update
    events: list[EventLine]
    state: str | None  # state at the end; None: no end is recorded
    spent: list[PhaseTimes]  # the oldest first

    @property
    def seconds(self) -> float:
        """The duration in seconds."""
        return self.end - self.begin

    def place(self, at: float) -> float:
        """Return the training time of a moment of the session, in seconds."""
        return self.offset + min(max(0.0, at - self.begin), self.seconds)


class FitSessions(NamedTuple):
    """All fits of a run."""

    listed: list[FitSession]
    has_times: bool  # False: the axis has updates, because the log is of an older version
    x: Floats  # (R,) training time in seconds of each update, or its step

    @property
    def seconds(self) -> float:
        """The training time of the run."""
        return math.fsum(session.seconds for session in self.listed)

    def place_at(self, row: int, at: float) -> float:
        """Return the training time of a moment after so many updates."""
        if math.isnan(at) or not self.has_times:
            return float(self.x[row - 1]) if 0 < row <= len(self.x) else 0.0
        for session in reversed(self.listed):
            if row > session.first_row or session is self.listed[0]:
                place: float = session.place(at)
                return place
        return 0.0


def sessions(history: RunHistory) -> FitSessions:
    """Arrange the fits of a run one after another."""
    updates = history.updates
    at = np.array(updates.at, dtype=np.float64)
    steps = np.array(updates.steps, dtype=np.float64)
    begins = list(updates.begins)
    if len(at) and (not begins or begins[0][0] > 0):
        begins.insert(0, (0, float(at[0])))  # the line with the start of the fit is missing
    has_times = not len(at) or bool(np.isfinite(at).all())
    # 1. Group events by fit; events before any start belong to the first fit.
    by_start: list[tuple[float, list[EventLine]]] = []
    for event in history.events:
        if event.kind == START or not by_start:
            by_start.append((event.at, []))
        by_start[-1][1].append(event)
    # 2. Assign updates to fits: a log belongs to the last fit started before the log.
    rows: dict[int, tuple[int, int]] = {}
    alone: list[tuple[float, int, int]] = []
    starts = [start for start, _ in by_start]
    is_ordered = starts == sorted(starts)
    ends = [*(row for row, _ in begins[1:]), *([len(at)] if begins else [])]
    for (row, begun_at), end_row in zip(begins, ends, strict=True):
        number = bisect_right(starts, begun_at + EARLY_S) - 1 if is_ordered else -1
        if number >= 0 and number not in rows:
            rows[number] = (row, end_row)
        else:
            alone.append((begun_at, row, end_row))
    found: list[tuple[float, list[EventLine], int, int]] = [
        (begin, events, *rows.get(number, (-1, -1)))
        for number, (begin, events) in enumerate(by_start)
    ]
    found += [(begin, [], row, end_row) for begin, row, end_row in alone]
    found.sort(key=lambda one: one[0])
    # 3. Arrange the fits one after another.
    listed: list[FitSession] = []
    evaluated = [evaluation.row for evaluation in updates.evaluations]
    noted = [note.row for note in updates.spent]
    x, offset, last_row = steps.copy(), 0.0, 0
    for begin, events, first_row, end_row in found:
        row = first_row if first_row >= 0 else last_row
        end_row = last_row = max(row, end_row)
        signs = [event.at for event in events] + [begin]
        if has_times and end_row > row:
            signs.append(float(at[row:end_row].max()))
        own = slice(bisect_right(evaluated, row), bisect_right(evaluated, end_row))
        signs += [e.at for e in updates.evaluations[own] if math.isfinite(e.at)]
        end = max(signs)
        ended = [event for event in events if event.kind == END]
        state = str(ended[-1].more.get("state") or "ended") if ended else None
        spent = updates.spent[bisect_left(noted, row) : bisect_left(noted, end_row)]
        spent += [last for event in ended if (last := spent_at_end(event)) is not None]
        listed.append(FitSession(begin, end, offset, row, end_row, events, state, spent))
        if has_times:
            x[row:end_row] = offset + np.clip(at[row:end_row] - begin, 0.0, end - begin)
        offset += end - begin
    return FitSessions(listed, has_times, x)


class WorkerTotal(NamedTuple):
    """The time of one worker by phase, over all sessions."""

    worker: int
    shards: int
    seconds: dict[str, float]  # by phase


def worker_totals(found: FitSessions) -> list[WorkerTotal]:
    """Sum the recorded time of each worker by phase."""
    shards: dict[int, float] = {}
    seconds: dict[int, dict[str, float]] = {}
    for session in found.listed:
        if not session.spent:
            continue
        last = session.spent[-1]
        for worker, count in enumerate(last.shards):
            shards[worker] = shards.get(worker, 0.0) + count
            sums = seconds.setdefault(worker, {})
            for phase, column in last.seconds.items():
                sums[phase] = sums.get(phase, 0.0) + column[worker]
    return [WorkerTotal(w, round(shards[w]), seconds[w]) for w in sorted(shards)]
