"""Traces as written: the common rules of all traces, and the contents."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROUNDED = 0.002  # microseconds: begins and ends are written with three digits


class Span(NamedTuple):
    name: str
    job: str
    step: int
    shard: int | None
    begin: float  # microseconds
    end: float
    process: int
    thread: int


class Written(NamedTuple):
    """A trace, read and found in order."""

    spans: list[Span]
    names: dict[tuple[int, int], str]  # of threads, by process and thread
    processes: dict[int, str]
    counters: dict[str, list[float]]

    def of(self, job: str, name: str) -> list[Span]:
        """Return the spans of a job with a name."""
        return [span for span in self.spans if (span.job, span.name) == (job, name)]

    def shards(self, job: str, name: str) -> set[tuple[int, int | None]]:
        """Return step and shard of the spans of a job with a name."""
        return {(span.step, span.shard) for span in self.of(job, name)}


def read(path: Path) -> Written:
    """Read a trace; check that spans of a thread follow each other or lie in each other."""
    whole: dict[str, Any] = json.loads(path.read_text())
    spans, names, processes = [], {}, {}
    counters: dict[str, list[float]] = defaultdict(list)
    for event in whole["traceEvents"]:
        where = event["pid"], event["tid"]
        match event["ph"]:
            case "X":
                args, begin = event["args"], event["ts"]
                spans.append(
                    Span(
                        *(event["name"], event["cat"], args["step"], args.get("shard")),
                        *(begin, begin + event["dur"], *where),
                    )
                )
            case "M" if event["name"] == "thread_name":
                names[where] = event["args"]["name"]
            case "M" if event["name"] == "process_name":
                processes[event["pid"]] = event["args"]["name"]
            case "C":
                counters[event["name"]].append(event["args"][event["name"]])
    written = Written(spans, names, processes, counters)
    _require_nested(written)
    return written


def _require_nested(written: Written) -> None:
    by_thread = defaultdict(list)
    for span in written.spans:
        assert span.begin >= 0
        assert span.end >= span.begin
        by_thread[span.process, span.thread].append(span)
    assert by_thread.keys() == written.names.keys()
    for where, spans in by_thread.items():
        if written.names[where].startswith("worker"):  # a single action at a time
            for before, after in pairwise(sorted(spans, key=lambda s: (s.begin, s.end))):
                assert before.end <= after.begin + ROUNDED, (before, after)
            continue
        around: list[Span] = []
        for span in sorted(spans, key=lambda s: (s.begin, -s.end)):
            while around and around[-1].end <= span.begin + ROUNDED:
                around.pop()
            assert not around or span.end <= around[-1].end + ROUNDED, (around[-1], span)
            around.append(span)
