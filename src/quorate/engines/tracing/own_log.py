"""The log of the worker that the calling thread is, for whoever computes in parts of its own.

A replica in stages knows no timesheet; it is called in its worker's thread, and so finds the log
here.
"""

from __future__ import annotations

from contextvars import ContextVar

from quorate.coordination.spans import SpanLog

_log: ContextVar[SpanLog | None] = ContextVar("quorate_span_log", default=None)


def own_log() -> SpanLog | None:
    """Return where spans of this thread's worker are noted; None: nobody wants them."""
    log = _log.get()
    return None if log is None or log.job is None else log


def begin(log: SpanLog, job: str | None, step: int, shard: int) -> None:
    """Have what this thread computes from now on be noted, as of a job; None: not any more.

    Args:
        step: of the shards that it was given.
        shard: the first of them.
    """
    log.begin(job, step, shard)
    _log.set(None if job is None else log)
