"""A trace in Chrome's format, which chrome://tracing and Perfetto open.

"Trace Event Format" (Google, 2016): an object with a list of events. A span is an event of phase X
with its begin and length in microseconds; M names processes and threads; C is a figure over time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from quorate.engines.tracing import COORDINATOR, NO_SHARD, Lane, Span, Trace

Event = dict[str, Any]


def as_json(trace: Trace) -> Iterator[bytes]:
    """Yield the file, one event per line, in the order of their begins."""
    spans = sorted(trace.spans, key=lambda each: (each[1].begin, -each[1].end))
    lanes = sorted({lane for lane, _ in spans}, key=_order)
    processes = {key: n for n, key in enumerate(dict.fromkeys(map(_process, lanes)))}
    threads = {lane: n for n, lane in enumerate(lanes)}
    # A span begun before the trace, such as the start of a worker, is shown in full.
    origin = min([trace.began, *(span.begin for _, span in spans[:1])])
    yield b'{"displayTimeUnit": "ms", "traceEvents": [\n'
    events = [
        *_names(lanes, processes, threads),
        *(_event(span, processes[_process(lane)], threads[lane], origin) for lane, span in spans),
        *_counters(trace, origin),
    ]
    for n, event in enumerate(events):
        yield (json.dumps(event) + (",\n" if n + 1 < len(events) else "\n")).encode()
    yield json.dumps({"leftOut": trace.left_out}).join(('], "otherData": ', "}\n")).encode()


def _order(lane: Lane) -> tuple[bool, int, str, int, str]:
    """Sort the coordinator first, then workers by number."""
    return lane.worker != COORDINATOR, lane.worker, lane.host, lane.pid, lane.track


def _process(lane: Lane) -> tuple[str, int]:
    return lane.host, lane.pid


def _names(
    lanes: list[Lane], processes: dict[tuple[str, int], int], threads: dict[Lane, int]
) -> Iterator[Event]:
    coordinator = next((_process(lane) for lane in lanes if lane.worker == COORDINATOR), None)
    hosts = {lane.host for lane in lanes}
    for lane in lanes:
        process, thread = processes[_process(lane)], threads[lane]
        who = "coordinator" if lane.worker == COORDINATOR else f"worker {lane.worker}"
        name = "coordinator" if _process(lane) == coordinator else who
        where = f" on {lane.host.partition(' ')[0]}" if len(hosts) > 1 else ""
        named: dict[str, dict[str, Any]] = {
            "process_name": {"name": f"{name} (process {lane.pid}{where})"},
            "process_sort_index": {"sort_index": process},
            "thread_name": {"name": f"{who}: {lane.track}" if lane.track else who},
            "thread_sort_index": {"sort_index": thread},
        }
        for kind, args in named.items():
            yield {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}


def _event(span: Span, process: int, thread: int, origin: float) -> Event:
    begin, end = _microseconds(span.begin - origin), _microseconds(span.end - origin)
    args: dict[str, int] = {"step": span.step}
    if span.shard != NO_SHARD:
        args["shard"] = span.shard
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.job or "coordinator",
        "pid": process,
        "tid": thread,
        "ts": begin,
        "dur": round(end - begin, 3),
        "args": args,
    }


def _counters(trace: Trace, origin: float) -> Iterator[Event]:
    for name, at, value in trace.counts:
        ts = _microseconds(at - origin)
        yield {"ph": "C", "name": name, "pid": 0, "tid": 0, "ts": ts, "args": {name: value}}


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)
