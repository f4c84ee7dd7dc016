"""A lost worker: killed on purpose when all else is measured, and when it computes again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from quorate.coordination.protocol import Done, Event, Joined, Left, Replace
from quorate.engines.worker_status import WorkerStatus

MOST_S = 60.0  # that are waited for it


class LostWorker:
    """The worker that is killed, and when what happened to it.

    The transport kills it, which knows for certain which process the worker is: a process number
    may be that of another process by now.

    Args:
        workers: of the run; the last one that has a process of its own here is killed. Without one
            there is nothing to wait for.
        send: takes the effect that ends the worker.
    """

    def __init__(self, workers: Sequence[WorkerStatus], send: Callable[[Replace], None]) -> None:
        self.detection_s: float | None = None
        self.restart_s: float | None = None  # until its first answer, without what that took
        self._killed_at = time.monotonic()
        self._left_at = 0.0
        self._joined_at: float | None = None
        self._number: int | None = None
        for worker in workers:
            is_own = worker.thread is None and worker.pid not in (None, os.getpid())
            if is_own and not worker.is_elsewhere:
                self._number = worker.number
        if self._number is not None:
            send(Replace(self._number, "killed, to see how long it is away"))

    def heard(self, event: Event | None, shard_s: float) -> None:
        """Note what the coordinator is told.

        Args:
            shard_s: what a shard takes.
        """
        now = time.monotonic()
        match event:
            case Left(worker) if worker == self._number and self.detection_s is None:
                self._left_at, self.detection_s = now, now - self._killed_at
            case Joined(worker) if worker == self._number and self.detection_s is not None:
                self._joined_at = now
            case Done(worker) if worker == self._number and self._joined_at is not None:
                at = max(self._joined_at, now - shard_s)
                self.restart_s = self.restart_s or at - self._left_at

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to wait for."""
        is_late = time.monotonic() - self._killed_at > MOST_S
        return self._number is None or self.restart_s is not None or is_late
