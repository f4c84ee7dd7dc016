"""Shared cores: the workers of a host compute on the same cores (processor sharing).

A job needs a number of seconds on a core of its own. With more threads than cores every job gets an
equal share of the cores, as from a fair scheduler. Where all cores compute, each core is slower
than a core alone, because the cores share memory, caches and clock; see ``inputs.Cores``.

A host records how many seconds of work every job of the host has received since the beginning, a
number common to all jobs. A job ends when the number has grown by the seconds of the job. So the
begin and the end of a job cost O(log N).

Legend: N workers.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from quorate.simulation.event_queue import EventQueue
from quorate.simulation.inputs import Cores

COORDINATOR = -1  # number of the coordinator's job; workers have the numbers from 0 on


class SharedCores:
    """Jobs on the cores of hosts. Times are virtual seconds, and never go back.

    Args:
        hosts: the number of each worker's host; the coordinator is on host 0.
        cores: the cores of each host, and the threads of each job.
        beside: number of permanent jobs of one thread on each host.
    """

    def __init__(self, hosts: Sequence[int], cores: Cores, beside: int = 0) -> None:
        self._host_of = hosts
        self._cores, self._beside = cores, beside
        self._hosts = [_Host() for _ in range(max(hosts, default=0) + 1)]
        self._tags: dict[int, float] = {}  # by job: ``_Host.given`` at the end of the job
        # The end of the first job of each host, void once a job of the host begins or ends.
        self._ends: EventQueue[_Host] = EventQueue()

    def begin(self, now: float, job: int, seconds: float) -> None:
        """Begin a job: a worker's number, or ``COORDINATOR``."""
        host = self._of(job)
        self._settle(host, now)
        self._tags[job] = tag = host.given + seconds
        heapq.heappush(host.ends, (tag, job))
        self._look_ahead(host, 1)

    def leave_off(self, now: float, job: int) -> None:
        """End a job early, if the job is under way."""
        if job in self._tags:
            host = self._of(job)
            self._settle(host, now)
            del self._tags[job]
            self._look_ahead(host, -1)

    @property
    def next_at(self) -> float:
        """The time at which the next job ends; infinite if there is none."""
        return self._ends.next_at

    def end(self) -> tuple[float, int]:
        """End the next job, and return its time and its number."""
        at, host = self._ends.next_at, self._ends.next()
        assert host is not None
        job = host.ends[0][1]
        self._settle(host, at)
        host.given = max(host.given, self._tags.pop(job))  # a rounding error may remain
        self._look_ahead(host, -1)
        return at, job

    def _of(self, job: int) -> _Host:
        return self._hosts[0 if job == COORDINATOR else self._host_of[job]]

    def _settle(self, host: _Host, now: float) -> None:
        """Record the work up to ``now``."""
        if host.jobs:
            host.given += max(0.0, now - host.at) / self._slowdown(host)
        host.at = max(host.at, now)

    def _slowdown(self, host: _Host) -> float:
        return self._cores.slowdown(host.jobs * self._cores.threads + self._beside)

    def _look_ahead(self, host: _Host, jobs: int) -> None:
        """Change the number of jobs of a host, and find the next end."""
        host.jobs += jobs
        host.version = version = host.version + 1
        while host.ends and self._tags.get(host.ends[0][1]) != host.ends[0][0]:
            heapq.heappop(host.ends)  # the job was ended
        if host.ends:
            at = host.at + max(0.0, host.ends[0][0] - host.given) * self._slowdown(host)
            self._ends.post(at, host, lambda: host.version == version)


class _Host:
    """The jobs of a host."""

    __slots__ = ("at", "ends", "given", "jobs", "version")

    def __init__(self) -> None:
        self.at = 0.0  # ``given`` is as of this time
        self.given = 0.0  # seconds of work that a job from the beginning would have received
        self.jobs = 0
        self.ends: list[tuple[float, int]] = []  # heap of (tag, job), some of them ended early
        self.version = 0  # number of changes of ``jobs``
