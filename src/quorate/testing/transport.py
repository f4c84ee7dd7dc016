"""Workers in memory: a transport without threads, processes or waiting.

Real replicas compute the shards, one after the other, in the thread of the coordinator, so the bits
are the same as with any other transport. A script decides what happens when. After the end of the
script, or without a script, workers behave normally.

Time is virtual: a shard takes one second unless the test says otherwise, and waiting takes no real
time. So tests of stragglers and timeouts are fast, and every run takes the same course.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from quorate.coordination.protocol import Effect, Event
from quorate.engines.job import Job, Training
from quorate.engines.worker_status import Timesheet, WorkerStatus
from quorate.replica.buffers import Buffers
from quorate.replica.replica import Replica
from quorate.testing.channel import InMemoryChannel
from quorate.testing.moves import Joins, Move, ScriptError


def one_second(worker: int, step: int, shard: int) -> float:  # noqa: ARG001
    """Return how long a shard takes: a second anywhere."""
    return 1.0


class InMemory:
    """A ``Transport`` whose workers follow a script.

    Args:
        replicas: one replica per worker.
        buffers: buffers of the coordinator's model.
        script: moves of the workers in the first training job, in order. All workers are present at
            the start, except workers whose first move is ``Joins``. After the end of the script,
            each worker finishes its shard when the time of the shard is over, and abandons canceled
            shards at once.
        threads: intra-op threads. The bits of matrix products depend on ``threads``.
        time_s: ``time_s(w, t, s)`` returns the virtual seconds that worker w takes for shard s of
            step t. Affects only copies of shards and timeouts. Default: one second.
        skips: whether to skip impossible moves. Default: an impossible move is an error.
    """

    can_replace = True
    takes_runs = False

    def __init__(
        self,
        replicas: Sequence[Replica],
        buffers: Buffers,
        script: Iterable[Move] = (),
        *,
        threads: int = 1,
        time_s: Callable[[int, int, int], float] = one_second,
        skips: bool = False,
    ) -> None:
        self.replicas = list(replicas)
        self.buffers = buffers
        self.script = deque(script)
        self.happened: list[Event | Effect] = []  # events, and what the coordinator sent
        self.threads = threads
        self.time_s = time_s
        self.skips = skips
        # Whole seconds and halves of them add up exactly, so that what happens at one time does.
        self.clock_s = float(int(time.monotonic()))
        self.sheets = [Timesheet() for _ in self.replicas]
        for sheet in self.sheets:
            sheet.tell("waiting")
        first_moves: dict[int, Move] = {}
        for move in self.script:
            if move.worker not in range(len(self.replicas)):
                raise ScriptError(f"{move}: there are workers 0 to {len(self.replicas) - 1}")
            first_moves.setdefault(move.worker, move)
        self.present = {
            worker
            for worker in range(len(self.replicas))
            if not isinstance(first_moves.get(worker), Joins)
        }

    def can_compute(self, dataset: object) -> bool:  # noqa: ARG002
        """Return True: workers in memory can load any dataset."""
        return True

    def open(self, job: Job) -> InMemoryChannel:
        """Begin a job. The first training job follows the script."""
        script: deque[Move] = deque()
        if isinstance(job, Training):
            script, self.script = self.script, deque()
        return InMemoryChannel(job, self, script)

    def status(self) -> list[WorkerStatus]:
        """Return the current status of each worker."""
        thread = threading.main_thread().native_id
        return [
            WorkerStatus(
                worker,
                str(replica.group),
                None,
                thread if worker in self.present else None,
                *self.sheets[worker].read(),
            )
            for worker, replica in enumerate(self.replicas)
        ]

    def close(self) -> None:
        """Do nothing; there are no processes to end."""
