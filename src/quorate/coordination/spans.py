"""Spans: the activities of a worker or coordinator with their times; a log of them, for traces.

Times are in seconds of the monotonic clock of the worker's host.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

NO_SHARD = -1
ANSWERING = "answering"  # what a phase ends with in which spans are handed over


class Span(NamedTuple):
    """An activity, from begin to end."""

    name: str  # "forward"
    job: str  # what it was done for: "training", "evaluation"; "" of a coordinator
    step: int
    shard: int  # or NO_SHARD
    begin: float
    end: float
    track: str = ""  # which thread or stage of its worker; "": the worker's own thread


class SpanLog:
    """Spans of a worker, until taken. A single thread adds, any thread may take."""

    def __init__(self) -> None:
        self.job: str | None = None  # what the worker computes for; None: nothing is noted
        self._at = (0, 0)  # step, and first shard of the run that it was given
        self._spans: deque[Span] = deque()
        self._cut_at = 0.0

    def begin(self, job: str | None, step: int, shard: int) -> None:
        """Note the purpose of a run of shards from ``shard`` on; None: note nothing."""
        self.job, self._at = job, (step, shard)

    def stage(self, name: str, stage: int, place: int, begin: float, end: float) -> None:
        """Add an activity of a stage of the worker's replica, by a clock of this host.

        Args:
            place: of the shard, in the run of the worker.
        """
        if self.job is not None:
            step, first = self._at
            track = f"stage {stage}"
            self._spans.append(Span(name, self.job, step, first + place, begin, end, track))

    def phase(self, name: str, step: int, shard: int, begin: float, end: float) -> None:
        """Add a finished phase of a worker, without any part already added by ``cut``."""
        if self.job is None:
            return
        if begin < self._cut_at:
            name, begin = ANSWERING, self._cut_at
        self._spans.append(Span(name, self.job, step, shard, begin, end))

    def cut(self, name: str, step: int, shard: int, begin: float, now: float) -> None:
        """Add the finished part of a phase at an answer; the rest is called ``ANSWERING``."""
        self.phase(name, step, shard, begin, now)
        self._cut_at = now

    def take(self) -> list[Span]:
        """Return the spans in the order of their ends, and forget them."""
        # By number: others may be added meanwhile.
        return [self._spans.popleft() for _ in range(len(self._spans))]
