"""Wrapped transports and channels pass everything on, and let subclasses observe a loop."""

from __future__ import annotations

from collections.abc import Sequence

from quorate.coordination.protocol import Event, WorkerEffect
from quorate.engines import Channel, Transport
from quorate.engines.job import Job
from quorate.engines.worker_status import WorkerStatus
from quorate.replica.shard_sum import Part


class WrappedTransport:
    """A ``Transport`` that passes every call on to an inner transport. Override observed methods.

    Args:
        inner: the transport that does the work.
    """

    takes_runs = False  # an observer sees single shards

    def __init__(self, inner: Transport) -> None:
        self.can_replace = inner.can_replace
        self._inner = inner

    def can_compute(self, dataset: object) -> bool:
        """Ask the inner transport."""
        return self._inner.can_compute(dataset)

    def open(self, job: Job) -> Channel:
        """Open the job on the inner transport."""
        return self._inner.open(job)

    def status(self) -> list[WorkerStatus]:
        """Ask the inner transport."""
        return self._inner.status()

    def close(self) -> None:
        """Close the inner transport."""
        self._inner.close()


class WrappedChannel:
    """A ``Channel`` that passes every call on to an inner channel. Override observed methods.

    Args:
        inner: the channel that does the work.
    """

    def __init__(self, inner: Channel) -> None:
        self._inner = inner

    def send(self, effect: WorkerEffect) -> None:
        """Pass an effect on."""
        self._inner.send(effect)

    def receive(self, timeout_s: float | None) -> Event | None:
        """Take an event from the inner channel. Blocks."""
        return self._inner.receive(timeout_s)

    def now(self) -> float:
        """Ask the inner channel for the time."""
        return self._inner.now()

    def post(self, event: Event) -> None:
        """Post to the inner channel. Any thread may."""
        self._inner.post(event)

    def collect(self, step: int, holders: Sequence[int]) -> list[Part]:
        """Collect from the inner channel. Blocks."""
        return self._inner.collect(step, holders)

    def publish(self) -> None:
        """Publish on the inner channel."""
        self._inner.publish()

    def error(self, worker: int, step: int, shard: int) -> BaseException:
        """Ask the inner channel."""
        return self._inner.error(worker, step, shard)

    def close(self) -> None:
        """Close the inner channel."""
        self._inner.close()
