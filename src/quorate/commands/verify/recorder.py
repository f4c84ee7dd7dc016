"""The recorder: a wrapper of a transport that records the parameters after each update.

``quorate run --record FOLDER`` enables the recorder. After enough updates the recorder ends the
program: the rest of the script is irrelevant.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quorate.commands.verify.recorded_training import (
    RecordedBackThrough,
    RecordedPassWithTotals,
    RecordedRepresenting,
    RecordedTraining,
)
from quorate.commands.verify.records import COORDINATOR, EndRecord, StepRecord, note
from quorate.coordination import rules
from quorate.coordination.protocol import (
    Cancelled,
    Compute,
    Discard,
    Done,
    Event,
    Failed,
    Joined,
    Left,
    Replace,
    WorkerEffect,
)
from quorate.engines import Channel, Transport, WrappedChannel, WrappedTransport
from quorate.engines.job import Job, PassWithTotals, Training
from quorate.engines.processes.script import current
from quorate.errors import SettingError
from quorate.replica.shard_sum import Part
from quorate.replica.witness.values import tensor_text
from quorate.training.batch_loss import BackThrough, Representing
from quorate.training.state import State

if TYPE_CHECKING:
    from quorate.training.observer import Observe

REPLACED_S = 60.0  # longest wait for the replacement of a killed worker
LOOK_S = 0.5  # interval between two checks of the wait

_Answer = Done | Failed | Cancelled


def recording(folder: Path, updates: int, kill_in: int | None = None) -> Observe:
    """Return an observer that records the first training loop of a program.

    Args:
        folder: folder for the records; empty at first.
        updates: number of updates to record.
        kill_in: the update, from 1, in which a worker process is killed. None: no kill.
    """

    def observe(transport: Transport, state: State, facts: Mapping[str, Any]) -> Transport:
        if any(folder.iterdir()):  # an earlier loop was recorded
            return transport
        rule = rules.parse(facts["update"])
        if not rules.keeps_bits(rule, facts["shards"]):
            transport.close()
            raise SettingError(
                "update",
                rule.name,
                "a rule whose bits do not depend on timing, to compare bits",
                "verify the script with --update sync",
            )
        kill = None
        if kill_in is not None and transport.can_replace:  # otherwise no worker is a process
            kill = Kill(state.global_step + kill_in - 1)
        return RecordedTransport(transport, _Recorder(state, facts, folder, updates), kill)

    return observe


class Kill:
    """The kill of one worker process, by signal 9, while the worker computes.

    The transport ends the process: only the transport knows for certain which process is the
    worker. A process number may belong to another process by now, or to a process of another host.

    Args:
        step: the step of the plan in which to kill.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._awaited: int | None = None  # the killed worker, until its replacement joins
        self._until = math.inf
        self._is_done = False

    def sent(self, effect: Compute) -> Replace | None:
        """Note an assigned shard; return the effect that kills the worker when the step is reached.

        The first worker of the step is killed.
        """
        if self._is_done or effect.step < self._step:
            return None
        self._is_done, self._awaited = True, effect.worker
        self._until = time.monotonic() + REPLACED_S
        return Replace(effect.worker, "killed, to see what follows")

    def heard(self, event: Event | None) -> None:
        """Note an event."""
        if isinstance(event, Joined) and event.worker == self._awaited:
            self._awaited = None

    @property
    def is_awaited(self) -> bool:
        """True while the remaining workers must wait, so that the replacement takes its part."""
        return self._awaited is not None and time.monotonic() < self._until


class RecordedTransport(WrappedTransport):
    """A transport whose training is recorded."""

    def __init__(self, inner: Transport, recorder: _Recorder, kill: Kill | None = None) -> None:
        super().__init__(inner)
        self.takes_runs = inner.takes_runs and recorder.has_stages  # shards through stages
        self._recorder = recorder
        self._kill = kill
        self._first = 0  # first step of the training

    def open(self, job: Job) -> Channel:
        """Open a job, with recording if the job is a training."""
        if not isinstance(job, Training):
            return super().open(job)
        folder = str(self._recorder.folder)
        if isinstance(job, BackThrough):
            told: Any = {"gradients": job.gradients, "first": self._first, "folder": folder}
            inner = RecordedBackThrough(
                job.source, job.parameters, job.steps, **told, **job.options()
            )
            return RecordedPass(super().open(inner), self._recorder)
        if isinstance(job, PassWithTotals):
            second = RecordedPassWithTotals(
                job.source, job.parameters, job.steps, folder=folder, **job.options()
            )
            return RecordedPass(super().open(second), self._recorder)
        recorded: Training
        if isinstance(job, Representing):
            recorded = RecordedRepresenting(job.source, job.parameters, job.steps, **job.options())
        else:
            how: Any = {"on_snapshots": job.on_snapshots, "folder": folder}
            recorded = RecordedTraining(
                job.source, job.parameters, job.steps, **how, **job.options()
            )
        self._first = job.steps.start
        self._recorder.begins(job.plan.steps_per_epoch)
        return RecordedChannel(super().open(recorded), self._recorder, self._kill)


class RecordedChannel(WrappedChannel):
    """The channel of the training, which reports each update to the recorder.

    Answers of workers are delivered only when all computing workers have answered: so each worker
    takes a fixed part of a step, the same in every run, even if a worker is slow.
    """

    def __init__(self, inner: Channel, recorder: _Recorder, kill: Kill | None = None) -> None:
        super().__init__(inner)
        self._recorder = recorder
        self._kill = kill
        self._computing: dict[int, int] = {}  # number of assigned shards, by worker
        self._held: list[tuple[_Answer, int]] = []  # answers and their numbers of shards
        self._due: deque[_Answer] = deque()

    def send(self, effect: WorkerEffect) -> None:
        """Forward an effect."""
        if isinstance(effect, Compute):
            self._computing[effect.worker] = effect.count
        super().send(effect)
        if isinstance(effect, Compute) and self._kill is not None:
            end = self._kill.sent(effect)
            if end is not None:
                super().send(end)

    def receive(self, timeout_s: float | None) -> Event | None:
        """Wait for an event; the caller has finished with its report.

        Raises:
            SystemExit: enough is recorded.
        """
        self._recorder.goes_on()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            is_awaited = self._kill is not None and self._kill.is_awaited
            if not self._computing and not is_awaited:
                answers = [answer for answer, _ in self._held]
                self._due.extend(sorted(answers, key=lambda answer: answer.worker))
                self._held.clear()
            if self._due:
                return self._due.popleft()
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            event = super().receive(min(LOOK_S, left_s or LOOK_S) if is_awaited else left_s)
            if self._kill is not None:
                self._kill.heard(event)
            if event is None and is_awaited and (left_s is None or left_s > 0):
                continue
            if not isinstance(event, _Answer | Left):
                return event
            count = self._computing.pop(event.worker, 1)
            if isinstance(event, Left):  # at once, or the worker would get another shard
                self._forget(event.worker)
                return event
            self._held.append((event, count))

    def _forget(self, worker: int) -> None:
        """Drop the answer of an ended worker, as if the worker had ended before answering."""
        for answer, count in self._held:
            if answer.worker == worker and isinstance(answer, Done):
                super().send(Discard(worker, answer.step, answer.shard, count))
        self._held = [held for held in self._held if held[0].worker != worker]

    def collect(self, step: int, holders: Sequence[int]) -> list[Part]:
        """Collect the gradients of a step, and record the workers of its shards."""
        parts = super().collect(step, holders)
        self._recorder.collected(step, parts)
        return parts

    def publish(self) -> None:
        """Publish the parameters after an update, and record the parameters."""
        super().publish()
        self._recorder.updated()

    def close(self) -> None:
        """Close the channel: the recording is over."""
        error = sys.exc_info()[1]
        self._recorder.is_over(None if isinstance(error, GeneratorExit) else error)
        super().close()


class RecordedPass(RecordedChannel):
    """The channel of a pass within an update: the end of the pass does not end the recording."""

    def publish(self) -> None:
        """Publish the results of the pass."""
        WrappedChannel.publish(self)

    def close(self) -> None:
        """Close the channel."""
        WrappedChannel.close(self)


class _Recorder:
    """The recorder of the state. One thread, the coordinator's."""

    def __init__(self, state: State, facts: Mapping[str, Any], folder: Path, updates: int) -> None:
        self.folder = folder
        self._state = state
        self._facts = facts
        self._left = updates
        self._updates = 0
        self._step = -1
        self._computed_by: dict[int, int] = {}  # shard -> worker, in the last update
        self.has_stages = facts.get("pipeline") is not None
        self._has_ended = False
        self._is_due = False  # whether the state has to be recorded

    def begins(self, steps_per_epoch: int) -> None:
        facts = {n: v for n, v in self._facts.items() if isinstance(v, (str, int, float, list))}
        script = current()
        sources = {} if script is None else script.sources()
        more = {
            "steps_per_epoch": steps_per_epoch,
            "sources": sources,
            "resumed_after": self._state.global_step,
        }
        note(self.folder, COORDINATOR, facts | more)
        self._is_due = True

    def collected(self, step: int, parts: Sequence[Part]) -> None:
        self._step = step
        shares = (share for _, total in parts for share in total.shares)
        self._computed_by = {share.shard: share.worker for share in shares}

    def updated(self) -> None:
        self._updates += 1
        self._is_due = True

    def goes_on(self) -> None:
        """Continue after the callbacks of the last update, and record the state.

        Raises:
            SystemExit: enough is recorded.
        """
        self._note()
        if self._updates >= self._left:
            self.is_over(None)
            raise SystemExit(0)

    def is_over(self, error: BaseException | None) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        self._note()
        text = "" if error is None else f"{type(error).__name__}: {error}"
        note(self.folder, COORDINATOR, EndRecord(self._updates, text, self._state.notes.doubts))

    def _note(self) -> None:
        """Record the state once per update, as a checkpoint would store it."""
        if not self._is_due:
            return
        self._is_due = False
        state = self._state
        note(
            self.folder,
            COORDINATOR,
            StepRecord(
                number=self._updates,
                step=self._step,
                lrs=[float(group["lr"]) for group in state.phases.param_groups],
                tensors={name: tensor_text(t) for name, t in state.tensors().items()},
                computed_by=self._computed_by,
            ),
        )
