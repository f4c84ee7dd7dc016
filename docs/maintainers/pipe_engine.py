"""An engine over ``subprocess`` and pipes: processes in the place of towers.

A worker process runs the script too, up to the training loop, and so has the model and the data.
There the process begins to compute the shards that the coordinator requests. A request carries the
parameters and the buffers, an answer the gradient.

    request   job, (step, shard), parameters, buffers
    answer    job, "ready", "done" or "failed", and the result or the exception
"""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NoReturn

from quorate.coordination.protocol import Compute, Event, Joined, Left
from quorate.engines import WrappedTransport
from quorate.engines.job import Job
from quorate.engines.job_channel import JobChannel, Request, StepSums
from quorate.engines.local.towers import Towers
from quorate.engines.messages import pack, unpack
from quorate.engines.shard_runner import ShardFailure, ShardRunner
from quorate.engines.worker_status import Timesheet, WorkerStatus
from quorate.replica.compute_thread import as_compute_thread
from quorate.replica.flat import Flat
from quorate.replica.shard_sum import ShardSum
from quorate.replica.streams import Stream
from quorate.training.state import State

PLACE = os.environ.get("PIPE_WORKER")  # in a worker process: its number, and its end of a pipe


class PipeEngine(WrappedTransport):
    """A ``Transport`` with a process in the place of each tower. Use ``observing(PipeEngine)``."""

    def __init__(self, towers: Towers, state: State, _facts: Any) -> None:
        super().__init__(towers)
        self.towers, self.buffers, self.can_replace = towers, state.buffers, True
        self.inbox: SimpleQueue[Any] = SimpleQueue()  # (worker process, answer)
        rows = [] if PLACE else towers.status()
        self.workers = [WorkerProcess(row.number, self.inbox) for row in rows]
        self.jobs = itertools.count(1)

    def open(self, job: Job) -> PipeChannel:
        """Begin a job; in a worker process, compute shards of the job from now on."""
        if PLACE:
            self._serve(job, *map(int, PLACE.split()))
        return PipeChannel(job, self)

    def status(self) -> list[WorkerStatus]:
        """Return the status of each worker."""
        rows = [(w.number, "cpu", w.process.pid, None, *w.sheet.read()) for w in self.workers]
        return [WorkerStatus(*row) for row in rows]

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers:
            worker.process.kill()
            worker.process.wait()
        super().close()

    def _serve(self, job: Job, number: int, fd: int) -> NoReturn:
        """Compute requested shards, until the coordinator's process has ended."""
        pipe, replica = Connection(fd), self.towers.replicas[number]
        runner, feed = ShardRunner(number, replica, Timesheet()), job.feed()
        pipe.send_bytes(pack([0, "ready", None]))
        thread = as_compute_thread(self.towers.threads, replica.device)
        with suppress(EOFError, OSError), thread, Stream() as stream:
            while True:
                of_job, (step, shard), parameters, buffers = unpack(pipe.recv_bytes())
                for vector, values in zip(job.parameters.vectors, parameters, strict=True):
                    vector.copy_(values)
                self.buffers.set(*buffers)
                # A copy of the job, because a replica remembers whose parameters it has.
                run = (copy.copy(job), lambda: feed, stream, step, shard, [None])
                outcome = runner.run(*run, is_cancelled=lambda: False)
                answer = [of_job, "failed", getattr(outcome, "error", None)]
                if isinstance(outcome, list):
                    done, vectors = outcome[0], outcome[0].gradient.vectors
                    value = (done.weight, done.metrics, vectors, done.buffers, done.integer_buffers)
                    answer = [of_job, "done", value]
                pipe.send_bytes(pack(answer))
        os._exit(0)


class WorkerProcess:
    """One process of a worker, and a thread that reads the answers of the process."""

    def __init__(self, number: int, inbox: SimpleQueue[Any]) -> None:
        self.number, self.inbox, self.sheet = number, inbox, Timesheet()
        self.sheet.tell("starting")
        self.pipe, theirs = Pipe()
        place = os.environ | {"PIPE_WORKER": f"{number} {theirs.fileno()}"}
        command, fds = [sys.executable, *sys.argv], [theirs.fileno()]
        self.process = subprocess.Popen(command, env=place, pass_fds=fds)
        theirs.close()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self.inbox.put((self, unpack(self.pipe.recv_bytes())))
        self.inbox.put((self, (0, "ended", None)))


class PipeChannel(JobChannel):
    """A ``Channel``: one job. All results lie in the coordinator's memory."""

    def __init__(self, job: Job, engine: PipeEngine) -> None:
        sums = [StepSums(job.plan, lambda _: None)] * len(engine.workers)
        super().__init__(job, sums, None, engine.inbox)
        self._engine, self._number = engine, next(engine.jobs)
        for worker in engine.workers:
            if worker.sheet.read().phase != "starting":  # an earlier job has heard of the worker
                engine.inbox.put((worker, (0, "ready", None)))

    def close(self) -> None:
        """Do nothing: a worker may go on with a shard of this job."""

    def _request(self, effect: Compute, request: Request) -> None:
        worker, buffers = self._engine.workers[effect.worker], self._engine.buffers
        worker.sheet.tell("forward", request.step, request.shard)
        place, values = (request.step, request.shard), (buffers.values(), buffers.integer_buffers())
        with suppress(OSError):  # the process has ended; ``receive`` reports the end
            worker.pipe.send_bytes(pack([self._number, place, self.job.parameters.vectors, values]))

    def _replace(self, worker: int, reason: str) -> None:  # noqa: ARG002
        self._engine.workers[worker].process.kill()

    def _event_of(self, news: Any) -> Event | None:
        if not isinstance(news, tuple):
            return news
        worker, (of_job, kind, value) = news
        if of_job not in (0, self._number):
            return None  # the answer is late, of an earlier job
        number = worker.number
        if kind == "ended":
            self._engine.workers[number] = WorkerProcess(number, self._engine.inbox)
            self._lose(number, RuntimeError("the process of the worker ended"))
            return Left(number, "its process ended", results_stay=True)
        worker.sheet.tell("waiting")
        if kind == "ready":
            return Joined(number)
        shard = self.requests[number].shard
        if kind == "failed":
            return self._answered(number, ShardFailure(shard, value), None)
        weight, metrics, vectors, *buffers = value
        gradient = Flat(self.job.parameters.layout.gradients, vectors)
        result = ShardSum(weight, metrics, gradient, *buffers).computed_by(number, shard)
        return self._answered(number, [result], None)
