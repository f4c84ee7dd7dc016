"""Worker processes: shared memory for tensors, and a socket each for small messages.

A pool starts the script again in each of them. Results of a worker that ends stay in shared memory.
Here are the jobs and the memory. The supervisor (``supervisor.py``) watches over processes, and
``agreement.py`` compares each worker with the coordinator.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from selectors import DefaultSelector
from typing import Any

from quorate.engines import Transport, selection
from quorate.engines.job import Job, Training, class_name, place
from quorate.engines.model_changes import ModelChanges
from quorate.engines.processes import worker_messages as messages
from quorate.engines.processes.agreement import Agreement
from quorate.engines.processes.channel import ProcessesChannel
from quorate.engines.processes.pool import LocalPool, WorkerHandle, WorkerPool
from quorate.engines.processes.script import Script
from quorate.engines.processes.supervisor import Supervisor
from quorate.engines.processes.wire import Alarm
from quorate.engines.servers import Servers
from quorate.engines.worker_status import Doing, WorkerStatus
from quorate.engines.workers import Workers
from quorate.errors import WorkerError
from quorate.machine.limits import FIRST_WORKERS_S
from quorate.replica.notes import Notes


class Processes:
    """A worker process per entry of devices, on this machine or on a Ray cluster.

    Args:
        script: the script that workers run.
        workers: the settings.
        agreement: compares workers with the coordinator, and has the shared memory.
        model_changes: returns user code's changes of the model.
        decided: how workers compute, as far as the coordinator found out; see ``Computing``.
        timeout_s: how long a worker may take to reach the training loop, and to answer there.
        notes: collects the workers' notes.
        handler: the ``class_name`` of a ``SliceHandler``, if servers may own the parameters.

    Raises:
        UserError: the machine or the cluster lacks a resource.
        WorkerError: a process cannot be started.
    """

    can_replace = True

    def __init__(
        self,
        script: Script,
        workers: Workers,
        agreement: Agreement,
        model_changes: Callable[[], ModelChanges],
        *,
        decided: Mapping[str, Any],
        timeout_s: float,
        notes: Notes,
        handler: str | None = None,
    ) -> None:
        self.arena = arena = agreement.arena
        self.buffers = agreement.buffers
        self.tickets: Iterator[int] = itertools.count()
        self.channels: dict[int, ProcessesChannel] = {}  # by the job's number
        self.agreement = agreement
        self._timeout_s = timeout_s
        self._notes = notes
        self.model_changes = model_changes
        self._decided = decided
        self._description = arena.handed_over()
        self._opened_jobs = 0
        # What is open is closed in the opposite order, also when the rest cannot be opened.
        with ExitStack() as opened:
            try:
                selector = opened.enter_context(DefaultSelector())
                self._alarm = opened.enter_context(closing(Alarm(selector)))
                if workers.engine == selection.RAY:
                    from quorate.engines.ray.pool import RayPool  # imports Ray, which is an extra

                    pool: WorkerPool = RayPool(script, arena, workers, self.wake, handler)
                else:
                    pool = LocalPool(script, len(agreement.groups), threads=workers.threads)
                opened.callback(pool.close)
                if (servers := pool.servers) is not None:
                    places = enumerate(servers.where)
                    each = ", ".join(f"server {n} on {where}" for n, where in places)
                    agreement.say(f"{servers.count} slices of the parameters: {each}")
                self.servers = servers
                self.takes_runs = pool.takes_runs and arena.takes_runs
                devices = [str(group) for group in agreement.groups]
                edited_file = partial(script.changed, script.sources())
                told = (devices, timeout_s, agreement.say, edited_file)
                self.supervisor = Supervisor(pool, self, selector, *told)
                opened.enter_context(closing(self.supervisor)).start()
            except OSError as error:
                raise WorkerError(f"workers cannot be started: {error}") from error
            self._opened = opened.pop_all()

    def can_compute(self, dataset: object) -> bool:
        """Return whether workers had this dataset when they came to the loop."""
        return self.agreement.name_of(dataset) is not None

    def open(self, job: Job) -> ProcessesChannel:
        """Return a job's channel. Workers are invited with its first ``receive``."""
        self._opened_jobs += 1
        channel = ProcessesChannel(self, job, self._opened_jobs)
        self.channels[channel.number] = channel
        return channel

    def begin(self, channel: ProcessesChannel) -> None:
        """Begin a channel's job. Blocks for the shard that workers are compared with."""
        job, number, gather_s = channel.job, channel.number, None
        is_first = number == 1 and isinstance(job, Training)
        # A coordinator whose own results are not repeatable, as was said, cannot be compared.
        self.agreement.expect(job, is_first=is_first and not self._notes.doubts)
        if is_first:
            # A user who wants to know the differences wants all workers to take part.
            gather_s = FIRST_WORKERS_S if job.is_compared else self._timeout_s
        self.arena.publish(self.buffers)
        self.supervisor.open(number, gather_s=gather_s)

    def forget(self, channel: ProcessesChannel) -> None:
        """End a job."""
        del self.channels[channel.number]
        if channel.has_begun:
            self.supervisor.end(channel.number)

    def status(self) -> list[WorkerStatus]:
        """Return the status of each worker. Thread-safe."""
        rows = []
        for life in self.supervisor.workers:
            handle = self.supervisor.handle(life.number)
            pid = None if handle is None else handle.pid
            doing = self.arena.sheets[life.number].read()
            where = (None, False) if handle is None else (handle.host, handle.is_elsewhere)
            rows.append(WorkerStatus(life.number, life.devices, pid, None, *doing, *where))
        return rows

    def wake(self) -> None:
        """End a ``pump``. Any thread, also a signal handler, may."""
        self._alarm.ring()

    def close(self) -> None:
        """End all workers: idle workers end at once, the rest is killed."""
        self._opened.close()

    # --- what the supervisor calls ----------------------------------------------------------------

    def welcome(self, worker: WorkerHandle) -> None:
        """Send the shared memory to a worker at the training loop."""
        self.arena.loads_ahead(worker.number, None)
        description, fds = self._description
        worker.post(messages.ShareMemory(dict(self._decided), description), *fds)

    def invite(self, worker: WorkerHandle, job: int) -> None:
        """Ask a worker to join a job, and for facts by which the two are compared.

        The worker answers ``JobReady``.
        """
        own = self.channels[job].job
        compares_data, start = self.agreement.checks(own, worker.comparison)
        request = messages.OpenJob(
            job=job,
            work=class_name(type(own)),
            averaged=own.parameters is self.arena.average,
            plan=own.plan.to_json(),
            steps=(own.steps.start, own.steps.stop),
            options=own.options(),
            traced=(own.traced.start, own.traced.stop),
            dataset=self.agreement.name_of(own.source.dataset),
            compares_data=compares_data,
            compares_gradient=start is not None,
        )
        fds = () if start is None else (start.fd,)
        worker.post_with(self.model_changes(), request, *fds)

    def accepts(self, worker: WorkerHandle, answer: messages.JobReady) -> bool:
        """Return whether a ready worker may join; invite a doubtful worker once more."""
        channel = self.channels.get(answer.job)
        if channel is None or self.agreement.check(
            channel.job, worker.comparison, answer, worker.number
        ):
            return True
        worker.post(messages.CloseJob(channel.number))
        self.invite(worker, channel.number)
        return False

    def receive(self, worker: int, message: messages.JobNews) -> None:
        """Take an answer to a request, or a note."""
        if isinstance(message, messages.FoundNote):
            self._notes.put(message.note)
            return
        if (channel := self.channels.get(message.job)) is not None:  # else the job is over
            channel.answered(worker, message)

    def is_computing(self, worker: int) -> bool:
        """Return whether a worker has a shard of any job."""
        return any(worker in channel.requests for channel in self.channels.values())

    def computing(self) -> frozenset[int]:
        """Return the workers at a shard whose time limit is the coordinator's affair.

        The coordinator looks after workers of the newest job: an evaluation interrupts the training
        loop. Workers of an interrupted job count until they are far behind their usual time.
        """
        newest = max(self.channels, default=0)
        return frozenset(
            worker
            for number, channel in self.channels.items()
            for worker in channel.requests
            if number == newest or not self.arena.sheets[worker].read().is_late
        )

    def last_shard(self, worker: int) -> tuple[Doing, str]:
        """Return a worker's last reported phase, and the shard in words."""
        doing = self.arena.sheets[worker].read()
        channels = [channel for _, channel in sorted(self.channels.items(), reverse=True)]
        own = [channel for channel in channels if worker in channel.requests]
        for channel in own or channels:
            return doing, channel.job.place(doing.step, doing.shard)
        return doing, place(Training.name, doing.step, doing.shard)

    def released(self, worker: int) -> None:
        """Mark a worker as starting: its process writes no more, and the next one not yet."""
        self.arena.sheets[worker].tell("starting")


def servers_of(workers: Transport) -> Servers | None:
    """Return the servers with the parameters of workers; None: the coordinator has them."""
    return workers.servers if isinstance(workers, Processes) else None
