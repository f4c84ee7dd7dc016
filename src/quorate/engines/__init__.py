"""Engines: how the coordinator reaches its workers.

Each engine is a file or a folder, and implements two protocols, ``Transport`` and ``Channel``.
``WrappedTransport`` and ``WrappedChannel`` pass everything on, and let subclasses observe a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # a transport's settings are read without torch
    from quorate.coordination.protocol import Event, WorkerEffect
    from quorate.engines.job import Job
    from quorate.engines.worker_status import WorkerStatus
    from quorate.replica.shard_sum import Part


class Channel(Protocol):
    """The connection of the coordinator to all workers, for one job."""

    def send(self, effect: WorkerEffect) -> None:
        """Send an effect to its worker. Does not block; keeps the order per worker."""

    def receive(self, timeout_s: float | None) -> Event | None:
        """Return the next event of any worker, or None after ``timeout_s`` seconds. Blocks."""

    def now(self) -> float:
        """Return the time in seconds, by the clock of ``receive``."""

    def post(self, event: Event) -> None:
        """Add an event of the coordinator. Safe from any thread and from signal handlers."""

    def collect(self, step: int, holders: Sequence[int]) -> list[Part]:
        """Return the sums that the workers ``holders`` hold of a step.

        Kept results may come individually, or added to sums. The caller may add to all of these in
        place. Their memory is valid until ``publish``.
        """

    def publish(self) -> None:
        """Signal that an update was made: shards sent from now on use the new parameters."""

    def error(self, worker: int, step: int, shard: int) -> BaseException:
        """Return the exception of user code in a failed shard, or how its worker ended."""

    def close(self) -> None:
        """End the job. The workers stay."""


class Transport(Protocol):
    """The owner of all workers of one kind, from construction to ``close``."""

    #: Whether the transport can end a worker that does not respond, and start a new one.
    can_replace: bool
    #: Whether a ``Compute`` may name several shards.
    takes_runs: bool

    def can_compute(self, dataset: object) -> bool:
        """Return whether the workers have this dataset."""

    def open(self, job: Job) -> Channel:
        """Begin a job. Each ready worker joins with an event of the channel."""

    def status(self) -> list[WorkerStatus]:
        """Return the status of each worker, by number. Thread-safe; does not block."""

    def close(self) -> None:
        """End all workers and free their resources. Blocks until the workers have ended."""


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
