"""Cores: processor sharing. Who computes on a host shares its cores with all others that do.

A job is so many seconds of computing on a core of its own. With more threads than cores each job
goes on at an equal share of them, as a fair scheduler gives it. Where all cores compute, each is
slower than one alone, as memory, caches and the clock are shared too: that is measured, and between
one core and all of them taken as a straight line.

A host keeps the work that each of its jobs was given since the beginning, the same for all: a job
ends when that has grown by its seconds. So whoever comes or goes costs O(log N), and not a pass.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from quorate.simulation.event_queue import EventQueue

COORDINATOR = -1  # a job's number, beside those of workers


class SharedCores:
    """Jobs on the cores of hosts. Times are virtual seconds, and never go back.

    Args:
        hosts: the number of each worker's host; the coordinator is on host 0.
        cores: of each host.
        threads: of each worker.
        crowding: times as long as alone a job takes where all cores compute.
        beside: other jobs of one thread on each host, all the time.
    """

    def __init__(
        self, hosts: Sequence[int], cores: int, threads: int, crowding: float, beside: int = 0
    ) -> None:
        self._host_of = hosts
        self._cores, self._threads = cores, threads
        self._crowding, self._beside = crowding, beside
        self._hosts = [_Host() for _ in range(max(hosts, default=0) + 1)]
        self._tags: dict[int, float] = {}  # by job: what ``_Host.given`` is at its end
        # The end of the first job of each host, void once a job of the host begins or ends.
        self._ends: EventQueue[_Host] = EventQueue()

    def begin(self, now: float, job: int, seconds: float) -> None:
        """Begin a job: a worker's number, or ``COORDINATOR``."""
        host = self._of(job)
        self._settle(host, now)
        self._tags[job] = tag = host.given + seconds
        heapq.heappush(host.ends, (tag, job))
        host.jobs += 1
        self._look_ahead(host)

    def leave_off(self, now: float, job: int) -> None:
        """End a job early, if the job is under way."""
        if job in self._tags:
            host = self._of(job)
            self._settle(host, now)
            del self._tags[job]
            host.jobs -= 1
            self._look_ahead(host)

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
        host.given = max(host.given, self._tags.pop(job))  # what rounding left
        host.jobs -= 1
        self._look_ahead(host)
        return at, job

    def _of(self, job: int) -> _Host:
        return self._hosts[0 if job == COORDINATOR else self._host_of[job]]

    def _settle(self, host: _Host, now: float) -> None:
        host.given += max(0.0, now - host.at) * self._rate(host)
        host.at = max(host.at, now)

    def _rate(self, host: _Host) -> float:
        """Return how many seconds of work each job is given in a second."""
        if not host.jobs:
            return 0.0
        wanted = host.jobs * self._threads + self._beside
        busy = min(wanted, self._cores)
        others = (busy - 1) / (self._cores - 1) if self._cores > 1 and busy > 1 else 0.0
        return min(1.0, self._cores / wanted) / (1.0 + (self._crowding - 1.0) * others)

    def _look_ahead(self, host: _Host) -> None:
        host.version += 1
        while host.ends and self._tags.get(host.ends[0][1]) != host.ends[0][0]:
            heapq.heappop(host.ends)  # it was left off
        if host.ends:
            at = host.at + max(0.0, host.ends[0][0] - host.given) / self._rate(host)
            version = host.version
            self._ends.post(at, host, lambda: host.version == version)


class _Host:
    """The jobs of a host."""

    __slots__ = ("at", "ends", "given", "jobs", "version")

    def __init__(self) -> None:
        self.at = 0.0
        self.given = 0.0  # seconds of work that each job was given, had it been there always
        self.jobs = 0
        self.ends: list[tuple[float, int]] = []  # tag, job: a heap, with some that were left off
        self.version = 0
