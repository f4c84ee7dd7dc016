"""The status of ranks: what takes the place of a transport in their loop."""

from __future__ import annotations

from quorate.engines import Channel
from quorate.engines.collective.liveness_monitor import LivenessMonitor
from quorate.engines.job import Job
from quorate.engines.worker_status import WorkerStatus
from quorate.errors import RankError


class Status:
    """The transport of the loop: what all ranks are at. It computes no other job."""

    can_replace = False
    takes_runs = False

    def __init__(self, monitor: LivenessMonitor) -> None:
        self._monitor = monitor

    def can_compute(self, dataset: object) -> bool:  # noqa: ARG002
        """Return whether its workers have this dataset: they compute nothing but the loop's."""
        return False

    def open(self, job: Job) -> Channel:
        """Refuse: see ``can_compute``."""
        raise RankError(f"the ranks are asked for {job.name}, and compute the loop's steps alone")

    def status(self) -> list[WorkerStatus]:
        """Return what all ranks are at, the others as of their last beat."""
        return self._monitor.status()

    def close(self) -> None:
        """Do nothing: the loop ends the ranks."""
