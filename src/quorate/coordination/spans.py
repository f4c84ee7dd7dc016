"""Spans: what a worker or a coordinator was at, from when to when. A log of them, for traces.

Times are in seconds of the monotonic clock of the host that they were taken on.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

NO_SHARD = -1
ANSWERING = "answering"  # what a phase ends with in which spans are handed over


class Span(NamedTuple):
    """One thing, from its begin to its end."""

    name: str  # "forward"
    job: str  # what it was done for: "training", "evaluation"; "" of a coordinator
    step: int
    shard: int  # or NO_SHARD
    begin: float
    end: float
    track: str = ""  # which thread or stage of its worker; "": the worker's own thread


class SpanLog:
    """Spans of one worker that nobody has taken yet. One thread adds, any other may take."""

    def __init__(self) -> None:
        self.job: str | None = None  # what the worker computes for; None: nothing is noted
        self._at = (0, 0)  # step, and first shard of the run that it was given
        self._spans: deque[Span] = deque()
        self._cut_at = 0.0

    def begin(self, job: str | None, step: int, shard: int) -> None:
        """Note what a run of shards is for, which begins with this one; None: note nothing."""
        self.job, self._at = job, (step, shard)

    def stage(self, name: str, stage: int, place: int, begin: float, end: float) -> None:
        """Add what a stage of the worker's replica did, by a clock of this host.

        Args:
            place: of the shard, in the run that the worker was given.
        """
        if self.job is not None:
            step, first = self._at
            track = f"stage {stage}"
            self._spans.append(Span(name, self.job, step, first + place, begin, end, track))

    def phase(self, name: str, step: int, shard: int, begin: float, end: float) -> None:
        """Add a phase of a worker that is over; what was cut off of it is not there again."""
        if self.job is None:
            return
        if begin < self._cut_at:
            name, begin = ANSWERING, self._cut_at
        self._spans.append(Span(name, self.job, step, shard, begin, end))

    def cut(self, name: str, step: int, shard: int, begin: float, now: float) -> None:
        """Add what is over of a phase in which an answer is given; the rest has another name."""
        self.phase(name, step, shard, begin, now)
        self._cut_at = now

    def take(self) -> list[Span]:
        """Return the spans, in the order in which they ended, and forget them."""
        # By number: others may be added meanwhile.
        return [self._spans.popleft() for _ in range(len(self._spans))]
