"""The channel of a job: carries effects to workers, and brings the workers' answers back.

    send      the coordinator's effect: a request to a worker, or a decision about results
    receive   an engine waits for a worker's answer, and passes the answer to ``_answered``
    collect   the sums of a step, for its update
    publish   the update was made: memory is recycled, and requests use the new parameters

An engine adds how a request travels, how an answer arrives, and where results lie.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from quorate.coordination import protocol
from quorate.engines import Channel
from quorate.engines.job import Job
from quorate.engines.shard_runner import Outcome, ShardFailure
from quorate.engines.step_sums import StepSums
from quorate.engines.tracing import Batch
from quorate.replica.shard_sum import Part, ShardSum
from quorate.replica.snapshots import Snapshot, Snapshots


@dataclass(slots=True)
class Request:
    """Consecutive shards of a step, from the request to a worker until the worker's answer."""

    step: int
    shard: int  # the first
    count: int  # of shards
    snapshot: Snapshot | None  # the parameters to compute from; None: the current parameters
    is_cancelled: bool = False
    ticket: int = 0  # names the request in messages to worker processes
    slots: list[int | None] = field(
        default_factory=list
    )  # by shard: where a worker process writes the result


class JobChannel(Channel):
    """The ``Channel`` of one job, without the ways of an engine.

    Args:
        job: the job.
        sums: by worker, where the worker's results are added. Workers may share one object.
        snapshots: lent to workers that compute during updates.
    """

    now = staticmethod(time.monotonic)  # called several times per update

    def __init__(self, job: Job, sums: list[StepSums], snapshots: Snapshots | None) -> None:
        self.job = job
        self._sums = sums
        self._snapshots = snapshots
        self.requests: dict[int, Request] = {}  # by worker
        self._errors: dict[tuple[int, int, int], BaseException] = {}  # by worker, step and shard
        self._collected: list[tuple[StepSums, ShardSum]] = []  # until ``publish``

    def send(self, effect: protocol.WorkerEffect) -> None:
        """Carry out an effect. Does not block."""
        worker = effect.worker
        match effect:
            case protocol.Compute():
                self._compute(effect)
            case protocol.Keep() | protocol.Discard():
                self._sums[worker].decide(effect)
                self._decided(worker)
            case protocol.Cancel():
                request = self.requests.get(worker)
                ticket = (effect.step, effect.shard)
                if request is not None and (request.step, request.shard) == ticket:
                    self._cancel(worker, request)
            case protocol.Replace():
                self._replace(worker, effect.reason)

    def collect(self, step: int, holders: Sequence[int]) -> list[Part]:
        """Return the sums of a step, and kept results not added yet."""
        parts = []
        for sums in dict.fromkeys(self._sums[worker] for worker in holders):
            own = sums.take(step)
            self._collected += [(sums, result) for _, result in own]
            parts += own
        return parts

    def publish(self) -> None:
        """Recycle the collected sums; requests from now on use the new parameters."""
        for sums, result in self._collected:
            sums.recycle(result)
        self._collected = []
        if self._snapshots is not None:
            self._snapshots.renew()

    def error(self, worker: int, step: int, shard: int) -> BaseException:
        """Return the exception of user code in a failed shard, or how its worker ended."""
        return self._errors[worker, step, shard]

    def _compute(self, effect: protocol.Compute) -> None:
        """Lend the worker a snapshot, if workers compute from snapshots, and pass the request."""
        snapshot = None if self._snapshots is None else self._snapshots.lend(effect.worker)
        request = Request(effect.step, effect.shard, effect.count, snapshot)
        self.requests[effect.worker] = request
        self._request(effect, request)

    def _answered(self, worker: int, outcome: Outcome, spans: Batch | None) -> protocol.Event:
        """Return the event of a worker's answer, which may have spans for the trace."""
        if self.job.trace is not None and spans is not None:
            self.job.trace.take_batch(worker, spans)
        request = self._end(worker)
        step, first = request.step, request.shard
        if outcome is None:
            return protocol.Cancelled(worker, step, first)
        if isinstance(outcome, ShardFailure):
            self._errors[worker, step, outcome.shard] = outcome.error
            return protocol.Failed(worker, step, outcome.shard)
        for result in outcome:
            self._sums[worker].put(step, result)
        return protocol.Done(worker, step, first)

    def _end(self, worker: int) -> Request:
        """End a worker's request: the worker uses the request's memory no more."""
        if self._snapshots is not None:
            self._snapshots.give_back(worker)
        return self.requests.pop(worker)

    # --- the ways of an engine --------------------------------------------------------------------

    @abstractmethod
    def _request(self, effect: protocol.Compute, request: Request) -> None:
        """Pass a request to its worker. Does not block."""

    def _decided(self, worker: int) -> None:
        """Add a worker's kept results, now or later."""
        self._sums[worker].add_kept()

    def _cancel(self, worker: int, request: Request) -> None:  # noqa: ARG002
        """Have a worker abandon a request. Does not block."""
        request.is_cancelled = True

    def _replace(self, worker: int, reason: str) -> None:
        """Kill a worker, and start a new worker. Does not block."""
        raise NotImplementedError
