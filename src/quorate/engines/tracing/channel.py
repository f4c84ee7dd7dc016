"""A channel whose waits and exchanges are noted in a trace."""

from __future__ import annotations

import time
from collections.abc import Sequence

from quorate.coordination.protocol import Event
from quorate.engines import Channel
from quorate.engines.tracing.trace import Trace
from quorate.engines.wrapped import WrappedChannel
from quorate.replica.shard_sum import Part

LEAST_WAIT_S = 50e-6  # shorter ones are left out: there is one per event


class TracedChannel(WrappedChannel):
    """The channel of a drive, in the coordinator's thread.

    Args:
        inner: the channel that does the work.
        trace: takes the spans.
    """

    def __init__(self, inner: Channel, trace: Trace) -> None:
        super().__init__(inner)
        self._trace = trace

    def receive(self, timeout_s: float | None) -> Event | None:
        """Wait for an event."""
        begin = time.monotonic()
        event = super().receive(timeout_s)
        end = time.monotonic()
        if end - begin >= LEAST_WAIT_S:
            self._trace.note("waiting for workers", begin, end)
        return event

    def collect(self, step: int, holders: Sequence[int]) -> list[Part]:
        """Collect the sums of a step."""
        with self._trace.span("collecting"):
            return super().collect(step, holders)

    def publish(self) -> None:
        """Publish an update."""
        with self._trace.span("publishing"):
            super().publish()
