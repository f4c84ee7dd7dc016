"""Summaries: curves of a run, for TensorBoard."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quorate.engines.worker_status import WorkerStatus
from quorate.replica.totals import Counts
from quorate.replica.witness.forward_graph import GraphNode
from quorate.services.device_use import DeviceGauges
from quorate.services.report import Report

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from quorate.services.tensorboard.event_file import EventFile

MIB = 1 << 20

Graph = Sequence[GraphNode]


class Summaries:
    """The service that writes TensorBoard's event files into ``RUN_DIR/summaries``.

    A tick writes one point per curve, over all updates since the last tick: means over every row,
    not samples. A tick that cannot write raises OSError and loses nothing; the next tick writes
    both.

    Args:
        run_dir: an existing directory.
        every_s: seconds between two points. Choose less if curves are too coarse; a kill -9 costs
            at most the points of one interval.
        status: returns the current status of the workers. Called in the service's thread.
        global_step: the step at which the run resumes. Later points, left by an interrupted run,
            are removed.
        finished: turns totals into numbers: once per interval, for all totals of the interval.
        clock: returns seconds, for rates.
        graph: the graph of the model; written once, if the folder has none.
    """

    name = "summaries"

    def __init__(
        self,
        run_dir: Path,
        every_s: float,
        *,
        status: Callable[[], list[WorkerStatus]],
        global_step: int,
        finished: Callable[[Counts], dict[str, float]] = lambda _totals: {},
        clock: Callable[[], float] = time.monotonic,
        graph: Graph | None = None,
    ) -> None:
        self.every_s = every_s
        self._folder = run_dir / "summaries"
        self._status = status
        self._gauges = DeviceGauges()  # read once per tick, by this service alone
        self._first_step = self._global_step = global_step
        self._finished = finished
        self._clock = clock
        self._graph = graph
        self._seconds: dict[int, dict[str, float]] = {}  # by worker and phase, at the last tick
        self._lock = threading.Lock()  # guards all fields below, and global_step
        self._interval = _Interval(clock())
        self._evaluations: list[tuple[float, int, dict[str, float]]] = []  # time, step, metrics
        self._events: EventFile | None = None
        self._writer: SummaryWriter | None = None

    def updated(self, report: Report) -> None:
        """Add an update to the interval. Called in the loop; takes microseconds."""
        with self._lock:
            self._interval.add(report)
            self._global_step = report.global_step

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        """Keep an evaluation for the next tick. Called in the loop."""
        with self._lock:
            self._evaluations.append((time.time(), global_step, dict(metrics)))

    @property
    def writer(self) -> SummaryWriter:
        """Torch's own writer, for images, text, ... Any thread; entries wait for the next tick."""
        events = self._event_file()
        with self._lock:
            if self._writer is None:
                from quorate.services.tensorboard.summary_writer import BufferedSummaryWriter

                self._writer = BufferedSummaryWriter(events)
            return self._writer

    def tick(self) -> None:
        """Write the points since the last tick. Returns when the points are on disk."""
        events = self._event_file()
        points = self._of_workers()
        with self._lock:
            evaluations, self._evaluations = self._evaluations, []
            global_step, now = self._global_step, self._clock()
            if self._interval.updates:  # else the interval continues: a rate covers all of its time
                points |= self._interval.points(now, self._finished)
                self._interval = _Interval(now)
        for wall_time, step, metrics in evaluations:
            validation = {f"validation/{name}": value for name, value in metrics.items()}
            events.add_scalars(validation, step, wall_time)
        events.add_scalars(points, global_step, time.time())
        events.write()

    def close(self) -> None:
        """Write the entries added by callbacks since the last tick; raises OSError like a tick."""
        self._gauges.close()
        try:
            if self._writer is not None:
                self._writer.close()  # closes files that a callback opened through torch
        finally:
            if self._events is not None:
                self._events.write()

    def _event_file(self) -> EventFile:
        # This takes 0.3 s, and is done lazily so that the loop does not wait.
        from quorate.services.tensorboard.event_file import EventFile, graph_def

        with self._lock:
            if self._events is None:
                graph = None if self._graph is None else partial(graph_def, self._graph)
                self._events = EventFile(self._folder, self._first_step, graph)
            return self._events

    def _of_workers(self) -> dict[str, float]:
        """Return the points about workers and their devices."""
        workers = self._status()
        points: dict[str, float | None] = {}
        devices, host = self._gauges.read(workers)
        for device in devices:
            memory = device.memory_bytes
            points[f"device/{device.worker}/use"] = device.use
            points[f"device/{device.worker}/memory_mib"] = memory and memory / MIB
        points["host/cpu"] = host.cpu
        points["host/memory_mib"] = host.memory_bytes / MIB
        for worker in workers:
            before = self._seconds.get(worker.number, {})
            points[f"waiting/{worker.number}"] = _share("waiting", before, worker.seconds)
        self._seconds = {worker.number: dict(worker.seconds) for worker in workers}
        return {name: value for name, value in points.items() if value is not None}


class _Interval:
    """The sums over the updates of an interval."""

    def __init__(self, began: float) -> None:
        self.updates = 0
        self._began = began  # on the service's clock
        self._rows = self._dropped_rows = 0
        self._staleness = self._staleness_max = 0
        self._metrics: dict[str, _MeanSum] = {}
        self._totals: Counts = {}
        self._losses: dict[str, _MeanSum] = {}  # by worker, and phase if there are phases
        self._norms: dict[str, _MeanSum] = {}  # by phase, like the losses
        self._rates: dict[str, float] = {}  # the newest
        self._last: Report | None = None

    def add(self, report: Report) -> None:
        self.updates += 1
        self._rows += report.rows
        self._dropped_rows += report.dropped_rows
        self._staleness += report.staleness
        self._staleness_max = max(self._staleness_max, report.staleness)
        for name, value in report.metrics.items():
            weight = report.weights.get(name, report.weight)
            if weight:  # a mean over nothing is NaN
                self._metrics.setdefault(name, _MeanSum()).add(value * weight, weight)
        for name, total in report.totals.items():
            self._totals[name] = total + self._totals.get(name, 0)
        phase = "" if report.phase is None else f"{report.phase}/"
        for worker, (loss, weight) in report.worker_losses.items():
            self._losses.setdefault(f"{phase}loss_{worker}", _MeanSum()).add(loss, weight)
        if report.grad_norm is not None:
            self._norms.setdefault(f"{phase}gradient_norm", _MeanSum()).add(report.grad_norm, 1.0)
        self._rates[f"{phase}learning_rate"] = report.lr
        for number, rate in enumerate(report.lrs):
            self._rates[f"{phase}learning_rate_{number}"] = rate
        self._last = report

    def points(
        self, now: float, finished: Callable[[Counts], dict[str, float]]
    ) -> dict[str, float]:
        """Return one value per curve. Needs at least one update."""
        assert self._last is not None
        dropped = self._last.dropped
        points = {
            **self._rates,
            "staleness": self._staleness / self.updates,
            "staleness_max": self._staleness_max,
            "dropped_shards": sum(dropped),
            "dropped_rows": self._dropped_rows,
        }
        if any(dropped):
            points |= {f"dropped/{worker}": shards for worker, shards in enumerate(dropped)}
        if self._last.not_finite:
            points["not_finite"] = self._last.not_finite
        if now > self._began:
            points["examples_per_s"] = self._rows / (now - self._began)
            points["global_step/sec"] = self.updates / (now - self._began)
        means = self._norms | self._losses
        points |= {name: mean.value for name, mean in means.items() if mean.weight}
        metrics = {name: mean.value for name, mean in self._metrics.items() if mean.weight}
        metrics |= finished(self._totals)  # of the sums: not a mean of values per update
        # A metric of the user may have the name of another curve.
        taken = points.keys() | means.keys() | {"gradient_norm"}
        return points | {f"metric_{n}" if n in taken else n: v for n, v in metrics.items()}


class _MeanSum:
    """A weighted mean: one division, at the end."""

    __slots__ = ("total", "weight")

    def __init__(self) -> None:
        self.total = self.weight = 0.0

    def add(self, weighted: float, weight: float) -> None:
        self.total += weighted
        self.weight += weight

    @property
    def value(self) -> float:
        return self.total / self.weight


def _share(phase: str, before: dict[str, float], now: dict[str, float]) -> float | None:
    """Return a phase's share of the time between two moments; None if there was no time."""
    passed = {name: seconds - before.get(name, 0.0) for name, seconds in now.items()}
    if min(passed.values(), default=0.0) < 0:
        passed = now  # a new worker has the same number, and counts from its own start
    total = sum(passed.values())
    return passed.get(phase, 0.0) / total if total > 0 else None
