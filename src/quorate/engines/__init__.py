"""Engines: how the coordinator reaches its workers.

Each engine is a file or a folder, and implements two protocols, ``Transport`` and ``Channel``.
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
