"""The lookout: when members are to be looked at though nothing is heard of them.

While all of them compute, or wait for a shard, no time is set for any of them, and there is nothing
to look for until some news but an answer comes. So a shard's answer does not cost a look at all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from quorate.engines.processes.arena import Arena
from quorate.engines.processes.channel import ProcessesChannel
from quorate.engines.processes.decisions import Decision
from quorate.engines.processes.supervisor import Supervisor
from quorate.machine.limits import WORKER_POLL_S


class CheckSchedule:
    """Looks at members at the times that they set.

    Args:
        members: who are looked at.
        channels: by number: of the jobs that are open.
        arena: says what each is at.
    """

    def __init__(
        self, members: Supervisor, channels: Mapping[int, ProcessesChannel], arena: Arena
    ) -> None:
        self._members = members
        self._channels = channels
        self._arena = arena
        self._is_calm = False  # whether nothing is due, at whatever time

    def stir(self) -> None:
        """Note that there was news, of which something may be due."""
        self._is_calm = False

    def sleeps_s(self, timeout_s: float | None) -> float | None:
        """Return how long to wait for news at most, if it were for others so long."""
        if self._is_calm:
            return timeout_s
        now = time.monotonic()
        limits = [max(0.0, at - now) for at in self._members.due(self._computing())]
        if len(self._channels) > 1:
            limits.append(WORKER_POLL_S)  # at those that compute for the job that is interrupted
        if timeout_s is not None:
            limits.append(timeout_s)
        return min(limits, default=None)

    def decisions(self) -> Iterator[Decision]:
        """Yield what is due now; each is to be carried out before the next one is asked for."""
        if self._is_calm:
            return
        now, computing = time.monotonic(), self._computing()
        self._is_calm = len(self._channels) < 2 and self._members.are_calm
        yield from self._members.tick(now)
        for member in self._members:
            yield from member.tick(now, is_computing=member.number in computing)

    def _computing(self) -> frozenset[int]:
        """Return the workers that were given a shard, and whose coordinator looks after them.

        That is the one of the newest job: an evaluation interrupts the training loop. Of an
        interrupted job's workers those are meant that are not far behind their usual time.
        """
        newest = max(self._channels, default=0)
        return frozenset(
            worker
            for number, channel in self._channels.items()
            for worker in channel.computing()
            if number == newest or not self._arena.doing(worker).is_late
        )
