"""The channel of rank 0: all ranks compute each step in lockstep, as one piece of work.

The ranks are one worker to the coordinator, and a step has one shard: no shard is dealt to another
rank, and the ranks end with the first lost rank.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from quorate.coordination.protocol import Compute, Done, Event, Joined, WorkerEffect
from quorate.engines import Channel
from quorate.replica.shard_sum import Part

RANKS = 0  # the number of the ranks as one worker


class LockstepChannel(Channel):
    """The ``Channel`` of a training on ranks.

    Args:
        sums: computes a step on all ranks, and returns the parts of the step's sum. Raises the
            errors of user code, the same on all ranks.
    """

    now = staticmethod(time.monotonic)

    def __init__(self, sums: Callable[[int], list[Part]]) -> None:
        self._sums, self._step = sums, 0
        self._parts: list[Part] = []
        self._events = deque[Event]([Joined(RANKS)])

    def send(self, effect: WorkerEffect) -> None:
        """Note the step of a request: the ranks need no decision about the result."""
        if isinstance(effect, Compute):
            self._step = effect.step

    def receive(self, timeout_s: float | None) -> Event:  # noqa: ARG002
        """Compute the requested step, unless an event waits. Blocks until all ranks are done."""
        if self._events:
            return self._events.popleft()
        self._parts = self._sums(self._step)
        return Done(RANKS, self._step, 0)

    def post(self, event: Event) -> None:
        """Add an event of the coordinator. Safe from any thread and from signal handlers."""
        self._events.append(event)

    def collect(self, step: int, holders: Sequence[int]) -> list[Part]:  # noqa: ARG002
        """Return the parts of the step's sum."""
        return self._parts

    def publish(self) -> None:
        """Do nothing: the ranks have made the update too."""

    def error(self, worker: int, step: int, shard: int) -> BaseException:
        """Refuse: ``receive`` raises the error of a step.

        Raises:
            LookupError: always.
        """
        raise LookupError(f"no error of worker {worker} in step {step}, shard {shard}")

    def close(self) -> None:
        """Do nothing: the loop ends the ranks."""
