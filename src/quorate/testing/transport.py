"""Workers in memory: a transport without threads, processes or waiting.

Shards are computed by real replicas, one after the other, in the thread of the coordinator, so the
bits are those of any other transport. When something happens is up to a script; when the script is
over, or there is none, nothing unusual happens any more.

Time is virtual: a shard takes a second unless the test says otherwise, and whoever waits is there
at once. So stragglers and silence take no time, and every run goes the same way.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from quorate.coordination.protocol import Effect, Event
from quorate.replica.buffers import Buffers
from quorate.replica.replica import Replica
from quorate.testing.channel import InMemoryChannel
from quorate.testing.moves import Joins, Move, ScriptError
from quorate.transports.job import Job, Training
from quorate.transports.worker_status import Timesheet, WorkerStatus


def one_second(worker: int, step: int, shard: int) -> float:  # noqa: ARG001
    """Return how long a shard takes: a second anywhere."""
    return 1.0


class InMemory:
    """A ``Transport`` whose workers do what a script says.

    Args:
        replicas: one per worker.
        buffers: of the coordinator's model.
        script: moves of workers in the first training job, in order. All workers are there from
            the start but those whose first move is ``Joins``. When it is over, whoever has a shard
            finishes it when its time has come, and leaves off what it was told to at once.
        threads: intra-op threads. The bits of a matrix product depend on it.
        time_s: how long worker w takes for shard s of step t, in virtual seconds. Only copies of
            shards depend on it, and silence.
        skips: whether a move that is impossible is left out. Else it is an error.
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
        self.sheets = [Timesheet(bytearray(Timesheet.SIZE)) for _ in self.replicas]
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
        """Return True: replicas compute whatever they are given."""
        return True

    def open(self, job: Job) -> InMemoryChannel:
        """Begin a job. The first that is a training has the script."""
        script: deque[Move] = deque()
        if isinstance(job, Training):
            script, self.script = self.script, deque()
        return InMemoryChannel(job, self, script)

    def status(self) -> list[WorkerStatus]:
        """Return what each worker is at."""
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
        """Do nothing: there is nobody to end."""
