"""The trace of a run: spans of the coordinator's threads and of all workers, in memory.

The owner of a trace sets the trace around a run, and code that may take time asks for the trace.
Without a trace, that costs a look at a context variable. Batches bring spans of other processes:
processes of one host have one monotonic clock; spans of another host are moved by the difference of
the wall clocks, which with NTP is some milliseconds.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from quorate.machine import this_host

if TYPE_CHECKING:
    from quorate.engines.job import Job

MOST_SPANS = 200_000  # some 30 MB as JSON, which viewers open with ease
LEAST_WAIT_S = 50e-6  # of a noted wait; there is a wait for each event
ALL_STEPS = range(1 << 62)
COORDINATOR = -1  # in the place of a worker's number
NO_SHARD = -1
ANSWERING = "answering"  # the end of a phase, after an answer with the spans until then


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
        """Note the purpose of a run of shards from ``shard`` on; None: note nothing.

        From here on this thread's code may add spans: a replica in stages knows no timesheet, and
        finds the log by ``own_log``.
        """
        self.job, self._at = job, (step, shard)
        _log.set(None if job is None else self)

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


class Lane(NamedTuple):
    """A row of the picture: host, process, worker and track of a span."""

    host: str
    pid: int
    worker: int  # or COORDINATOR
    track: str


class Trace:
    """Spans and counts of a run. Any thread may add.

    Args:
        steps: whose spans are kept.
        most: limit of spans; later spans are counted.
    """

    def __init__(self, steps: range = ALL_STEPS, most: int = MOST_SPANS) -> None:
        self.steps = steps
        self.began = time.monotonic()
        self.step = 0  # that the run is at
        self.left_out = 0
        self.spans: list[tuple[Lane, Span]] = []
        self.counts: list[tuple[str, float, float]] = []  # name, when, value
        self._most = most
        self._host = this_host.mark()

    @property
    def is_on(self) -> bool:
        """True if the spans of the current step are kept."""
        return self.step in self.steps

    def steps_of(self, job: Job) -> range:
        """Return the steps of a job whose spans are kept: only training counts global steps."""
        if job.name == "training":
            return self.steps
        return ALL_STEPS if self.is_on else range(0)

    def put(self, worker: int, spans: list[Span]) -> None:
        """Add spans of a worker, or of the coordinator, in this process."""
        self._keep(Lane(self._host, os.getpid(), worker, ""), spans)

    def take_batch(self, worker: int, batch: Batch) -> None:
        """Add a batch from a worker process."""
        self._keep(Lane(batch["host"], batch["pid"], worker, ""), moved(batch, self._host))

    def take_own(self, track: str) -> list[Span]:
        """Return and remove all spans, as of a track: a trace in a second process keeps them."""
        own, self.spans = self.spans, []
        return [span._replace(track=track) for _, span in own]

    def note(
        self, name: str, begin: float, end: float, track: str = "", step: int | None = None
    ) -> None:
        """Add a span of the coordinator, in seconds of this host's monotonic clock.

        Args:
            step: of the begin; None: the current step.
        """
        step = self.step if step is None else step
        if step in self.steps:
            self.put(COORDINATOR, [Span(name, "", step, NO_SHARD, begin, end, track)])

    def note_wait(self, begin: float) -> None:
        """Add a wait for workers from ``begin`` until now, unless the wait was short."""
        end = time.monotonic()
        if end - begin >= LEAST_WAIT_S:
            self.note("waiting for workers", begin, end)

    @contextmanager
    def span(self, name: str, track: str = "") -> Iterator[None]:
        """Time the block as a span of the coordinator, also after an exception."""
        step, begin = self.step, time.monotonic()
        try:
            yield
        finally:
            self.note(name, begin, time.monotonic(), track, step)

    def count(self, name: str, value: float) -> None:
        """Add the present value of a counter."""
        if self.is_on and len(self.counts) < self._most:
            self.counts.append((name, time.monotonic(), value))

    def _keep(self, lane: Lane, spans: list[Span]) -> None:
        kept = spans[: max(0, self._most - len(self.spans))]
        self.left_out += len(spans) - len(kept)
        for span in kept:
            own = lane if not span.track else lane._replace(track=span.track)
            self.spans.append((own, span))


_NOTHING = nullcontext()
_current: ContextVar[Trace | None] = ContextVar("quorate_trace", default=None)


def current() -> Trace | None:
    """Return the current trace; None without a trace."""
    return _current.get()


def span(name: str) -> AbstractContextManager[None]:
    """Return a context that times a span of the coordinator, if there is a trace."""
    trace = _current.get()
    return _NOTHING if trace is None else trace.span(name)


@contextmanager
def tracing(trace: Trace) -> Iterator[Trace]:
    """Set the current trace within the block, for this thread and new contexts."""
    token = _current.set(trace)
    try:
        yield trace
    finally:
        _current.reset(token)


Batch = dict[str, Any]

_mark = cache(this_host.mark)


def batch(spans: list[Span]) -> Batch:
    """Return spans of this process as a message."""
    clock = time.time() - time.monotonic()
    return {"host": _mark(), "pid": os.getpid(), "clock": clock, "spans": spans}


def moved(sent: Batch, host: str) -> list[Span]:
    """Return the spans of a batch, by this host's monotonic clock.

    Args:
        host: mark of this host.
    """
    shift = 0.0
    if sent["host"] != host:
        shift = sent["clock"] - (time.time() - time.monotonic())
    spans = [Span(*fields) for fields in sent["spans"]]
    return [s._replace(begin=s.begin + shift, end=s.end + shift) for s in spans] if shift else spans


_log: ContextVar[SpanLog | None] = ContextVar("quorate_span_log", default=None)


def own_log() -> SpanLog | None:
    """Return the span log of this thread's worker; None without a trace."""
    return _log.get()
