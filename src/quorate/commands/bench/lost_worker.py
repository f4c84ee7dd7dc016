"""A lost worker: killed on purpose after all other measurements, and timed until the return."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from quorate.coordination.protocol import Done, Event, Joined, Left, Replace
from quorate.engines.worker_status import WorkerStatus

MOST_S = 60.0  # longest wait for the return


class LostWorker:
    """The worker killed on purpose, and the times of its loss and return.

    The transport kills the worker, because only the transport knows the process for certain: a
    process number may belong to another process by now.

    Args:
        workers: the workers of the run; the last one with a separate process on this host is
            killed. Without such a worker there is nothing to wait for.
        send: receives the effect that ends the worker.
    """

    def __init__(self, workers: Sequence[WorkerStatus], send: Callable[[Replace], None]) -> None:
        self.detection_s: float | None = None
        self.restart_s: float | None = None  # from the detection to the start of its first shard
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
        """Note an event of the coordinator.

        Args:
            shard_s: usual seconds per shard, subtracted from the time of the first answer.
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
        """True if no worker was killed, the worker is back, or the wait has become too long."""
        is_late = time.monotonic() - self._killed_at > MOST_S
        return self._number is None or self.restart_s is not None or is_late
