"""Transports: how the coordinator reaches its workers. A file or folder each, and two protocols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # a transport's settings are read without torch
    from quorate.coordination.protocol import Cancel, Compute, Discard, Event, Keep, Replace
    from quorate.replica.shard_sum import Part
    from quorate.transports.job import Job
    from quorate.transports.worker_status import WorkerStatus


class Channel(Protocol):
    """The coordinator's end of a conversation with all workers about one job."""

    def send(self, effect: Compute | Keep | Discard | Cancel | Replace) -> None:
        """Tell the worker that the effect names what to do. Does not block; in order per worker."""

    def receive(self, timeout_s: float | None) -> Event | None:
        """Return the next event of any worker, or None after ``timeout_s`` seconds. Blocks."""

    def now(self) -> float:
        """Return the time, in seconds of the clock that ``receive`` waits by."""

    def post(self, event: Event) -> None:
        """Put in an event of the coordinator's own. Any thread, also a signal handler, may."""

    def collect(self, step: int, holders: Sequence[int]) -> list[Part]:
        """Return the sums that the holders hold of a step. Blocks until what was kept is added up.

        The sums may be added to in place, and are valid until ``publish``.
        """

    def publish(self) -> None:
        """Note that an update is made: shards sent from now on are computed from what it left."""

    def error(self, worker: int, step: int, shard: int) -> BaseException:
        """Return what user code raised in a shard that has failed, or how its worker ended."""

    def close(self) -> None:
        """End the job. Workers stay."""


class Transport(Protocol):
    """The owner of all workers of one kind, from its construction to ``close``."""

    can_replace: bool  # whether a worker that does not answer can be ended, and another started
    takes_runs: bool  # whether ``Compute`` may have several shards

    def can_compute(self, dataset: object) -> bool:
        """Return whether its workers have this dataset."""

    def open(self, job: Job) -> Channel:
        """Begin a job; every worker joins through the channel's events when it is ready."""

    def status(self) -> list[WorkerStatus]:
        """Return what each worker is at, by number. Any thread may; does not block."""

    def close(self) -> None:
        """End all workers and free what they hold. Blocks until they are gone."""
