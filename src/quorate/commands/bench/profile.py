"""The profile of a training loop: the parts of the loop's time, measured around the transport.

``quorate run --profile FILE`` enables the profile. A profiled transport forwards to the wrapped
transport and keeps time: of each update, of the coordinator's work in the update, and of the
workers' phases. After enough measurements, or at the end of the loop, the profile writes ``FILE``
and ends the program: the rest of the script is irrelevant.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from quorate.commands.bench.cpu_time import CpuTime, cpu_time
from quorate.commands.bench.lost_worker import LostWorker
from quorate.commands.bench.measured import Measured, WorkerTime, no_seconds
from quorate.commands.bench.stages import StageSpans
from quorate.coordination import rules
from quorate.coordination.protocol import Event, Keep, Replace, WorkerEffect
from quorate.engines import Channel, Transport, WrappedChannel, WrappedTransport
from quorate.engines.job import Job, Training
from quorate.engines.worker_status import WorkerStatus
from quorate.machine.resources import usable_cores
from quorate.replica.digest import digest
from quorate.replica.shard_sum import Part
from quorate.services.display.shard_time import WORK
from quorate.training.state import State

if TYPE_CHECKING:
    from quorate.training.observer import Observe

# The first updates create state for later updates: compiled kernels, memory, rows loaded ahead.
WARM_UP_UPDATES, WARM_UP_SHARE = 3, 0.25
LEAST_UPDATES = 3
FIRST_DIGEST = 4  # then after twice as many updates, and so on


def profiling(file: Path, seconds: float, *, kills: bool = False) -> Observe:
    """Return an observer that measures a training loop.

    Args:
        file: file for the result.
        seconds: time to measure, after the warm-up.
        kills: whether to kill a worker afterwards, and wait until the worker computes again.
    """

    def observe(transport: Transport, state: State, facts: Mapping[str, Any]) -> Transport:
        return Profiled(transport, LoopClock(transport, state, facts, file, seconds, kills=kills))

    return observe


class Profiled(WrappedTransport):
    """A transport that times its jobs."""

    def __init__(self, inner: Transport, clock: LoopClock) -> None:
        super().__init__(inner)
        self._clock = clock
        # Stages overlap only shards that are assigned together.
        self.takes_runs = clock.stages is not None and inner.takes_runs

    def open(self, job: Job) -> Channel:
        """Open a job and time it."""
        if job.interrupts_training:  # a part of the current update
            return super().open(job)
        if isinstance(job, Training):
            self._clock.job = job
            job.trace_to(job.trace or self._clock.stages)
            return TrainingChannel(super().open(job), self._clock)
        self._clock.evaluation_begins()
        return EvaluationChannel(super().open(job), self._clock)


class EvaluationChannel(WrappedChannel):
    """The channel of an evaluation, which is excluded from the time of steps."""

    def __init__(self, inner: Channel, clock: LoopClock) -> None:
        super().__init__(inner)
        self._clock = clock

    def close(self) -> None:
        """Close the channel: the evaluation is over."""
        super().close()
        self._clock.evaluation_ends()


class TrainingChannel(WrappedChannel):
    """The channel of the training, which reports each update to the clock."""

    def __init__(self, inner: Channel, clock: LoopClock) -> None:
        super().__init__(inner)
        self._clock = clock

    def send(self, effect: WorkerEffect) -> None:
        """Forward an effect; the caller has finished with its report."""
        self._clock.goes_on(super().send)
        if isinstance(effect, Keep):
            for shard in range(effect.shard, effect.shard + effect.count):
                self._clock.kept(effect.step, shard)
        super().send(effect)

    def receive(self, timeout_s: float | None) -> Event | None:
        """Wait for an event; the caller has finished with its report."""
        self._clock.goes_on(super().send)
        event = super().receive(timeout_s)
        self._clock.heard(event)
        return event

    def collect(self, step: int, holders: Sequence[int]) -> list[Part]:
        """Collect the gradients of a step, and time the collection."""
        self._clock.collecting(holders)
        parts = super().collect(step, holders)
        self._clock.collected(step)
        return parts

    def publish(self) -> None:
        """Publish the parameters after an update, and time the publication."""
        self._clock.updated()
        super().publish()
        self._clock.published()

    def close(self) -> None:
        """Close the channel, and end the program if enough was measured.

        Raises:
            SystemExit: enough was measured.
        """
        error = sys.exc_info()[1]
        left = isinstance(error, GeneratorExit)  # by the script: close() must not end it
        measured = (error is None or left) and self._clock.is_over()
        super().close()
        if measured and not left:
            raise SystemExit(0)


class LoopClock:
    """The sums of the parts of a loop's time. One thread, the coordinator's.

    An update passes through these methods, in this order: ``collecting``, ``collected``,
    ``updated``, ``published``, ``goes_on``; evaluations come between the last two.

    Args:
        transport: reports the status of the workers.
        state: the state of the loop.
        facts: the entries about the run in a checkpoint.
        file: file for the result.
        seconds: time to measure.
        kills: whether to kill a worker afterwards.
    """

    def __init__(
        self,
        transport: Transport,
        state: State,
        facts: Mapping[str, Any],
        file: Path,
        seconds: float,
        *,
        kills: bool = False,
    ) -> None:
        self.job: Training | None = None
        self._transport = transport
        self._state = state
        self._facts = facts
        self._file = file
        self._seconds = seconds
        self._kills = kills
        self._measured: Measured | None = None  # set when a worker is about to be killed
        self._lost: LostWorker | None = None
        self._keeps_bits = rules.keeps_bits(rules.parse(facts["update"]), facts["shards"])
        status = transport.status()
        self.stages = None if facts["pipeline"] is None else StageSpans()
        self._devices = {w.number: [*map(torch.device, w.device.split("+"))] for w in status}
        self._rows: dict[int, int] = {}  # by step: rows of the accepted shards
        self._digests: dict[int, str] = {}
        self._updates = 0
        self._first: float | None = None  # time of the first update
        self._at = 0.0  # start of the current part
        self._is_held = False  # whether the caller holds a report
        self._evaluation: tuple[float, list[WorkerStatus]] | None = None  # time and status at start
        self._begun: _ClockStart | None = None  # set when the warm-up is over
        self._spent = _ClockSums(status)

    def kept(self, step: int, shard: int) -> None:
        """Count the rows of a shard accepted for an update."""
        assert self.job is not None
        self._rows[step] = self._rows.get(step, 0) + len(self.job.plan.shard(step, shard))

    def collecting(self, holders: Sequence[int]) -> None:
        """Begin the collection of a step, after waiting for devices that compute asynchronously."""
        self._at = time.monotonic()
        for device in {device for worker in holders for device in self._devices[worker]}:
            self._synchronize(device)
        self._spent.device_s += self._lap()

    def collected(self, step: int) -> None:
        """Count a step whose gradients are collected."""
        self._spent.exchange_s += self._lap()
        self._spent.rows += self._rows.pop(step, 0)

    def updated(self) -> None:
        """Count the time of an update that is made but not yet published."""
        self._synchronize(self._state.parameters.device)
        mean_s = self._state.update.mean_s
        self._spent.exchange_s += mean_s
        self._spent.update_s += self._lap() - mean_s

    def published(self) -> None:
        """Count an update: from now on the caller holds the report."""
        self._spent.exchange_s += self._lap()
        self._spent.updates += 1
        self._updates += 1
        self._is_held = True

    def goes_on(self, send: Callable[[Replace], None]) -> None:
        """End the time in which the caller held the report of the last update, if any.

        Args:
            send: receives the effect that kills a worker, after all other measurements.

        Raises:
            SystemExit: the measurement is complete and written.
        """
        if not self._is_held:
            return
        self._is_held = False
        self._spent.beside_s += self._lap()
        if self._measured is not None:
            return
        self._take_digest()
        now = time.monotonic()
        if self._first is None:
            self._first = now
        elif self._begun is None:
            is_warm = now - self._first >= WARM_UP_SHARE * self._seconds
            if is_warm and self._updates >= WARM_UP_UPDATES:
                cpu = cpu_time()
                status = self._transport.status()
                self._spent = _ClockSums(status)
                if self.stages is not None:
                    self.stages.begin(self._state.global_step)
                self._begun = _ClockStart(self._updates, time.monotonic(), status, cpu)
        elif (
            now - self._begun.at - self._spent.paused_s >= self._seconds
            and self._spent.updates >= LEAST_UPDATES
        ):
            self._measured = self._sums(now)
            if not self._kills:
                self._write(now)
                raise SystemExit(0)
            self._lost = LostWorker(self._transport.status(), send)

    def heard(self, event: Event | None) -> None:
        """Observe the return of a killed worker.

        Raises:
            SystemExit: the worker computes again, and the result is written.
        """
        if self._lost is None:
            return
        assert self._measured is not None
        workers = [worker for worker in self._measured.workers if worker.shards]
        work_s = sum(of.seconds[phase] for of in workers for phase in WORK)
        self._lost.heard(event, work_s / max(1, sum(of.shards for of in workers)))
        if self._lost.is_over:
            self._write(time.monotonic())
            raise SystemExit(0)

    def is_over(self) -> bool:
        """Write the measurements of a loop that ended early; return whether there were any."""
        if self._is_held:
            self._is_held = False
            self._spent.beside_s += self._lap()
        if self._begun is None or self._spent.updates == 0:
            return False
        self._write(time.monotonic())
        return True

    def evaluation_begins(self) -> None:
        """Stop the clock for an evaluation."""
        self._evaluation = time.monotonic(), self._transport.status()

    def evaluation_ends(self) -> None:
        """Start the clock again after an evaluation."""
        if self._evaluation is None:
            return
        (began, before), self._evaluation = self._evaluation, None
        took_s = time.monotonic() - began
        self._spent.evaluation_s += took_s
        self._spent.paused_s += took_s
        self._at += took_s  # the caller's report began before the evaluation
        for was, status in zip(before, self._transport.status(), strict=True):
            self._spent.not_training[status.number].add(was, status)

    def _synchronize(self, device: torch.device) -> None:
        """Wait until a device has finished the work of this process.

        Skipped if workers continue during the update: the wait would then be for the workers'
        kernels.
        """
        assert self.job is not None
        is_here = self._state.parameters.device.type != "cpu"  # and not in worker processes
        if is_here and device.type != "cpu" and not self.job.on_snapshots:
            torch.accelerator.synchronize(device)

    def _take_digest(self) -> None:
        n = self._updates
        if not self._keeps_bits or n < FIRST_DIGEST or n & (n - 1):
            return
        began = time.monotonic()
        self._digests[n] = digest(self._state.tensors().items())
        took_s = time.monotonic() - began
        self._spent.paused_s += took_s
        for worker in self._spent.not_training.values():
            worker.seconds["waiting"] += took_s

    def _lap(self) -> float:
        now = time.monotonic()
        took_s, self._at = now - self._at, now
        return took_s

    def _write(self, now: float) -> None:
        measured = self._measured or self._sums(now)
        if self._lost is not None:
            found = self._lost
            measured = replace(measured, detection_s=found.detection_s, restart_s=found.restart_s)
        measured.write(self._file)

    def _sums(self, now: float) -> Measured:
        assert self._begun is not None
        assert self.job is not None
        begun, spent = self._begun, self._spent
        workers = []
        for was, status in zip(begun.status, self._transport.status(), strict=True):
            total, besides = _PhaseSums(), spent.not_training[status.number]
            total.add(was, status)
            seconds = {n: max(0.0, s - besides.seconds[n]) for n, s in total.seconds.items()}
            shards = total.shards - besides.shards
            workers.append(WorkerTime(status.number, status.device, shards, seconds))
        return Measured(
            update=self._facts["update"],
            keeps_bits=self._keeps_bits,
            engine=self._facts["engine"],
            threads=self._facts["threads"],
            cores=usable_cores(),
            shards=self._facts["shards"],
            batch_size=self._facts["batch_size"],
            loader_workers=self.job.loader_workers,
            updates=spent.updates,
            rows=spent.rows,
            seconds=now - begun.at - spent.paused_s,
            workers=workers,
            device_s=spent.device_s,
            exchange_s=spent.exchange_s,
            update_s=spent.update_s,
            beside_s=spent.beside_s,
            evaluation_s=spent.evaluation_s,
            others_cores=cpu_time().others_s(begun.cpu) / (now - begun.at),
            warm_up=begun.updates,
            digests=self._digests,
            pipeline=self._facts["pipeline"],
            stages=[] if self.stages is None else self.stages.times(),
        )


class _ClockStart(NamedTuple):
    """The start of the measured time."""

    updates: int  # before the measured time
    at: float  # time.monotonic()
    status: list[WorkerStatus]
    cpu: CpuTime


class _PhaseSums:
    """The time of a worker by phase, summed over intervals."""

    def __init__(self) -> None:
        self.seconds = no_seconds()
        self.shards = 0

    def add(self, before: WorkerStatus, after: WorkerStatus) -> None:
        for phase, seconds in after.seconds.items():
            self.seconds[phase] += seconds - before.seconds[phase]
        self.shards += after.shards - before.shards


class _ClockSums:
    """The sums since the start of the measured time; names as in ``Measured``."""

    def __init__(self, workers: Sequence[WorkerStatus]) -> None:
        self.updates = 0
        self.rows = 0
        self.device_s = self.exchange_s = self.update_s = self.beside_s = self.evaluation_s = 0.0
        self.paused_s = 0.0  # in evaluations and digests
        self.not_training = {worker.number: _PhaseSums() for worker in workers}  # by worker
