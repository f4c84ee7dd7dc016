"""The status of ranks: what takes the place of a transport in their loop."""

from __future__ import annotations

import os

from quorate.errors import RankError
from quorate.training.collective.member import Member
from quorate.training.crew import Crew
from quorate.transports import Channel
from quorate.transports.job import Job
from quorate.transports.worker_status import WorkerStatus


class Status:
    """The transport of the loop: what rank 0 is at. It computes no other job."""

    can_replace = False

    def __init__(self, member: Member, crew: Crew) -> None:
        self._member, self._crew = member, crew

    def can_compute(self, dataset: object) -> bool:  # noqa: ARG002
        """Return whether its workers have this dataset: they compute nothing but the loop's."""
        return False

    def open(self, job: Job) -> Channel:
        """Refuse: see ``can_compute``."""
        raise RankError(f"the ranks are asked for {job.name}, and compute the loop's steps alone")

    def status(self) -> list[WorkerStatus]:
        """Return what this rank is at."""
        doing = self._member.sheet.read()
        device = self._crew.groups[0]
        return [WorkerStatus(0, str(device), os.getpid(), None, *doing)]

    def close(self) -> None:
        """Do nothing: the loop ends the ranks."""
