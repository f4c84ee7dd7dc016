"""Stages of replicas in a bench: the busy time of each, and the idle time of their schedule.

The times come from the spans recorded by stages: from the arrival of a shard's inputs until the
stage has finished the shard. The share of these times in a step is the busy time; the rest is the
bubble of the schedule, the waiting due to different times of stages, and the part of the step
outside of the pipeline.

Legend: p devices of a replica, S stages, m shards of a worker in a step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from quorate.commands.bench.schedule_times import (
    ActionTimes,
    bubble,
    in_flight,
    makespan,
    stages_of,
)
from quorate.coordination.pipeline_schedules import SCHEDULES, Rows, Work
from quorate.engines.tracing import Batch, Span, Trace
from quorate.errors import SettingError
from quorate.services.display.shard_time import duration

FORWARDS = (Work.FORWARD,)
BACKWARDS = (Work.BACKWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT)
TRACK = "stage "  # prefix of the tracks of stages, before the number


@dataclass(frozen=True)
class StageTime:
    """The activity of one stage of a worker's replica in the measured time."""

    worker: int
    stage: int
    steps: int  # steps with shards in the stage
    shards: int  # shards passed through the stage
    forward_s: float
    backward_s: float


class StageSpans(Trace):
    """A trace that keeps no span, but sums the busy time of stages. Any thread may add."""

    def __init__(self) -> None:
        super().__init__()
        self._first_step = 0
        self._steps: dict[tuple[int, int], set[int]] = {}  # by worker and stage
        self._seconds: dict[tuple[int, int, str], float] = defaultdict(float)  # and by work
        self._shards: Counter[tuple[int, int]] = Counter()

    def begin(self, step: int) -> None:
        """Forget earlier spans, and count the spans from this step on."""
        self._first_step = step
        self._steps.clear()
        self._seconds.clear()
        self._shards.clear()

    def put(self, worker: int, spans: list[Span]) -> None:
        """Count spans of a worker."""
        for span in spans:
            if span.step < self._first_step or not span.track.startswith(TRACK):
                continue
            where = worker, int(span.track.removeprefix(TRACK))
            self._steps.setdefault(where, set()).add(span.step)
            self._seconds[(*where, span.name)] += span.end - span.begin
            self._shards[where] += span.name == "forward"

    def take_batch(self, worker: int, batch: Batch) -> None:
        """Count spans sent by a worker process: durations do not depend on the clock."""
        self.put(worker, [Span(*fields) for fields in batch["spans"]])

    def times(self) -> list[StageTime]:
        """Return the counts, by worker and stage."""
        return [
            StageTime(
                *where,
                len(self._steps[where]),
                self._shards[where],
                *(self._of(where, works) for works in (FORWARDS, BACKWARDS)),
            )
            for where in sorted(self._steps)
        ]

    def _of(self, where: tuple[int, int], works: Sequence[Work]) -> float:
        return sum(self._seconds[(*where, work.value)] for work in works)


def lines(stages: Sequence[StageTime], schedule: str, devices: int, step_s: float) -> Iterator[str]:
    """Yield the lines about stages; means over workers.

    Args:
        stages: the stages of all workers.
        schedule: name of the schedule.
        devices: number of devices of a replica.
        step_s: seconds between two updates.
    """
    if not (stages := [stage for stage in stages if stage.shards]):
        return
    # 1. The busy time.
    by_number = [
        [stage for stage in stages if stage.stage == number]
        for number in range(1 + max(stage.stage for stage in stages))
    ]
    if not all(by_number):
        return
    busy = [fmean((s.forward_s + s.backward_s) / s.steps for s in own) for own in by_number]
    listed = ", ".join(f"{number} {s / step_s:.0%}" for number, s in enumerate(busy))
    words = f"stages: busy {listed} of a step"
    if len(busy) > devices:
        of_devices = [sum(busy[device::devices]) for device in range(devices)]
        words += f"; devices {', '.join(f'{s / step_s:.0%}' for s in of_devices)}"
    yield words
    # 2. The idle time of the schedule.
    shards = max(1, round(fmean(stage.shards / stage.steps for stage in stages)))
    times = ActionTimes(
        tuple(fmean(s.forward_s / s.shards for s in own) for own in by_number),
        tuple(fmean(s.backward_s / s.shards for s in own) for own in by_number),
    )
    rows = SCHEDULES[schedule](len(busy), shards, devices=devices)
    held = " + ".join(map(str, in_flight(rows)))
    yield (
        f"{schedule}, {shards} shards: idle {bubble(rows, ActionTimes()):.0%} if stages took "
        f"the same time, {bubble(rows, times):.0%} with theirs, which is "
        f"{duration(makespan(rows, times))} of a step's {duration(step_s)}; "
        f"activations of {held} shards"
    )
    # 3. The idle time of alternative schedules.
    others = {name: _bubble(name, rows, shards, devices, times) for name in SCHEDULES}
    shown = [
        f"{name} {idle:.0%}"
        for name, idle in others.items()
        if name != schedule and idle is not None and idle < bubble(rows, times) - 0.005
    ]
    if shown:
        yield f"less would be idle with {', '.join(shown)}"


def _bubble(name: str, rows: Rows, shards: int, devices: int, times: ActionTimes) -> float | None:
    """Return the idle share of a schedule for these times; None if it does not fit the stages."""
    try:
        return bubble(SCHEDULES[name](stages_of(rows), shards, devices=devices), times)
    except SettingError:
        return None
