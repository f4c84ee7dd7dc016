"""The status of ranks, in the place of a transport in their loop."""

from __future__ import annotations

from quorate.engines import Channel
from quorate.engines.collective.liveness_monitor import LivenessMonitor
from quorate.engines.job import Job
from quorate.engines.worker_status import WorkerStatus
from quorate.errors import RankError


class RankStatus:
    """The transport of a loop on ranks: has the status of all ranks, and computes no more jobs."""

    can_replace = False
    takes_runs = False

    def __init__(self, monitor: LivenessMonitor) -> None:
        self._monitor = monitor

    def can_compute(self, dataset: object) -> bool:  # noqa: ARG002
        """Return whether the ranks can compute with a dataset: no, ranks compute the loop alone."""
        return False

    def open(self, job: Job) -> Channel:
        """Refuse a job: see ``can_compute``.

        Raises:
            RankError: always.
        """
        raise RankError(f"the ranks are asked for {job.name}, and compute the loop's steps alone")

    def status(self) -> list[WorkerStatus]:
        """Return the status of all ranks; of the other ranks, as of the last heartbeat."""
        return self._monitor.status()

    def close(self) -> None:
        """Do nothing: the loop ends the ranks."""
