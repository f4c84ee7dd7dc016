"""The trace of one run: starts with the run, and is written at its end, however the run ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import isfinite
from pathlib import Path

from quorate.engines import tracing as taking
from quorate.engines.tracing import Trace, span
from quorate.machine.atomic_file import write_atomically
from quorate.services.report import Report
from quorate.services.run_directory.settings import RunDir
from quorate.services.tracing.chrome import as_json

__all__ = ["after_update", "begun", "span", "traced"]


@contextmanager
def traced(run_dir: RunDir, say: Callable[[str], None]) -> Iterator[None]:
    """Take a trace within the block, if the settings name a file, and write the trace at the end.

    The trace is also written after an exception: it shows the events before the error. A failure to
    write the file is reported, and does not fail the run.
    """
    if run_dir.trace is None:
        yield
        return
    trace, path = Trace(run_dir.traced_steps), Path(run_dir.trace)
    try:
        with taking.tracing(trace):
            yield
    finally:
        try:
            write_atomically(path, as_json(trace))
        except OSError as error:
            say(f"the trace was not written: {error}")
        else:
            more = f" ({trace.left_out:,} later spans were dropped)" if trace.left_out else ""
            say(f"trace: {len(trace.spans):,} spans{more} in {path}")


def begun(global_step: int) -> None:
    """Note the first step, if a trace is taken."""
    if (trace := taking.current()) is not None:
        trace.step = global_step


def after_update(report: Report) -> AbstractContextManager[None]:
    """Return a context for the work between an update and the next step."""
    if (trace := taking.current()) is None:
        return nullcontext()
    trace.step = report.global_step
    loss = report.metrics.get("loss")
    for name, value in (("loss", loss), ("examples per s", report.examples_per_s)):
        if value is not None and isfinite(value):  # JSON has neither NaN nor infinity
            trace.count(name, value)
    return trace.span("between updates")
