"""Batches: spans on their way from a worker's process to the coordinator's, as JSON has them.

Processes of one host have one monotonic clock. Those of another host have another, and are moved by
what the wall clocks say: spans of different hosts are as far apart as these are, which with NTP is
some milliseconds.
"""

from __future__ import annotations

import os
import time
from functools import cache
from typing import Any

from quorate.coordination.spans import Span
from quorate.machine import this_host

Batch = dict[str, Any]

_mark = cache(this_host.mark)


def batch(spans: list[Span]) -> Batch:
    """Return spans of this process as they travel."""
    clock = time.time() - time.monotonic()
    return {"host": _mark(), "pid": os.getpid(), "clock": clock, "spans": spans}


def moved(sent: Batch, host: str) -> list[Span]:
    """Return the spans of a batch, by this host's monotonic clock.

    Args:
        host: the mark of this one.
    """
    shift = 0.0
    if sent["host"] != host:
        shift = sent["clock"] - (time.time() - time.monotonic())
    spans = [Span(*fields) for fields in sent["spans"]]
    return [s._replace(begin=s.begin + shift, end=s.end + shift) for s in spans] if shift else spans
