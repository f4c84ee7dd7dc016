"""The channel of a job: carries effects to workers, and brings the workers' answers back.

    send      the coordinator's effect: a request to a worker, or a decision about results
    receive   the answer of a worker arrives in the inbox, and becomes an event
    collect   the sums of a step, for its update
    publish   the update was made: memory is recycled, and requests use the new parameters

An engine adds how a request travels, and where results lie. ``StepSums``
adds the results of workers along the tree of each step:

    put        a worker has computed shards; the coordinator has not decided about the shards yet
    decide     the coordinator keeps or discards shards
    add_next   a thread with time adds a kept result to the sum of its step
    take       the update gets the sums of its step, and kept results not added yet
    recycle    the memory of a result or sum is free again: after the update, or after a discard

Legend: V shards of a step.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from quorate.coordination import protocol
from quorate.coordination.plan import Plan
from quorate.coordination.protocol import Discard, Keep
from quorate.coordination.tree import Node, TreeSum, leaves
from quorate.engines import Channel
from quorate.engines.job import Job
from quorate.engines.shard_runner import Outcome, ShardFailure
from quorate.engines.tracing import Batch
from quorate.replica.shard_sum import Part, ShardSum
from quorate.replica.snapshots import Snapshot, Snapshots


class _Result(msgspec.Struct, eq=False):
    """The result of a shard, or of all shards below a node, until the coordinator's decisions."""

    node: Node
    sum: ShardSum
    undecided: int  # shards
    is_kept: bool = False  # whether the coordinator keeps one of the shards


class StepSums:
    """Results of one worker for one job, or of several workers with common memory.

    Threads besides the coordinator's call ``add_next`` and ``add_kept`` alone.

    Args:
        plan: of the job.
        recycle: takes back the memory of a result or sum.
    """

    def __init__(self, plan: Plan, recycle: Callable[[ShardSum], None]) -> None:
        self.recycle = recycle
        self._plan = plan
        self._undecided: dict[tuple[int, int, int], _Result] = {}  # by worker, step and shard
        self._kept: deque[tuple[int, Node, ShardSum]] = deque()  # with the step; not added yet
        self._sums: dict[int, TreeSum[ShardSum]] = {}  # by step
        self._adding = threading.Lock()
        self._error: Exception | None = None  # from an addition by another thread

    def put(self, step: int, result: ShardSum) -> None:
        """Take the result of a shard, or of all shards below a node of the tree."""
        shares = result.shares
        level = (len(shares) - 1).bit_length()
        undecided = _Result((level, shares[0].shard >> level), result, len(shares))
        for shard, worker, _, _ in shares:
            self._undecided[worker, step, shard] = undecided

    def result(self, worker: int, step: int, shard: int) -> ShardSum:
        """Return a result that awaits the coordinator's decision."""
        return self._undecided[worker, step, shard].sum

    def decide(self, effect: Keep | Discard) -> None:
        """Keep or discard results.

        A sum of shards counts from the first kept shard on. Copies of the sum's other shards have
        the same bits, but a sum cannot lose a shard. So the copies are recycled.
        """
        worker, step, keeps = effect.worker, effect.step, isinstance(effect, Keep)
        for shard in range(effect.shard, effect.shard + effect.count):
            result = self._undecided.pop((worker, step, shard))
            result.undecided -= 1
            if result.is_kept:
                continue
            if keeps:
                result.is_kept = True
                if result.node[0] > 0:
                    self._recycle_copies(step, result.node)
                self._kept.append((step, result.node, result.sum))
            elif not result.undecided:
                self.recycle(result.sum)

    def _recycle_copies(self, step: int, node: Node) -> None:
        """Recycle kept results of shards below a node.

        None of the results is in a sum with shards beyond the node, because a shard below the node
        is missing.
        """
        self.add_kept()
        parts, shards = self._sum_of(step).parts, self._plan.shards_of(step)
        for part in [part for part in parts if leaves(part, shards)[0] in leaves(node, shards)]:
            self.recycle(parts.pop(part))

    @property
    def has_kept(self) -> bool:
        """True if ``add_next`` may have an addition to make; a lone kept result waits for more."""
        return len(self._kept) > 1 or bool(self._kept and self._sums)

    def add_next(self) -> bool:
        """Add one kept result to the sum of its step; return False if there is none."""
        with self._adding:
            if not self._kept:
                return False
            step, node, result = self._kept.popleft()
            sums = self._sums.get(step) or self._sum_of(step)
            sums.put(node, result)
            return True

    def add_kept(self) -> None:
        """Add all kept results. An error is raised by ``take``, in the coordinator's thread."""
        try:
            while self._kept and self.add_next():
                pass
        except Exception as error:  # the edge of the thread
            self._error = error

    def take(self, step: int) -> list[Part]:
        """Return the sums of a step, with kept results not added yet, and forget the step.

        Blocks while another thread adds a result.

        Raises:
            Whatever was raised by an addition in another thread.
        """
        with self._adding:
            if self._error is not None:
                raise self._error
            parts = [*self._sums.pop(step).parts.items()] if step in self._sums else []
            for _ in range(len(self._kept)):
                of, node, result = kept = self._kept.popleft()
                if of == step:
                    parts.append((node, result))
                else:
                    self._kept.append(kept)
            return parts

    def _sum_of(self, step: int) -> TreeSum[ShardSum]:
        if step not in self._sums:
            self._sums[step] = TreeSum(self._plan.shards_of(step), self._add)
        return self._sums[step]

    def _add(self, left: ShardSum, right: ShardSum) -> ShardSum:
        left.add(right)
        self.recycle(right)
        return left


class Request(msgspec.Struct, eq=False):
    """Consecutive shards of a step, from the request to a worker until the worker's answer."""

    step: int
    shard: int  # the first
    count: int  # of shards
    snapshot: Snapshot | None  # the parameters to compute from; None: the current parameters
    is_cancelled: bool = False
    ticket: int = 0  # names the request in messages to worker processes
    slots: list[int | None] = []  # by shard: where a worker process writes the result


class JobChannel(Channel):
    """The ``Channel`` of one job, without the ways of an engine.

    Args:
        job: the job.
        sums: by worker, where the worker's results are added. Workers may share one object.
        snapshots: lent to workers that compute during updates.
        inbox: events, and answers for ``_event_of``; any thread puts. Default: a new queue.
    """

    now = staticmethod(time.monotonic)  # called several times per update

    def __init__(
        self,
        job: Job,
        sums: list[StepSums],
        snapshots: Snapshots | None,
        inbox: SimpleQueue[Any] | None = None,
    ) -> None:
        self.job = job
        self.inbox = SimpleQueue[Any]() if inbox is None else inbox
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

    def receive(self, timeout_s: float | None) -> protocol.Event | None:
        """Return the next event, or None after ``timeout_s`` seconds. Blocks."""
        try:
            while (event := self._event_of(self.inbox.get(timeout=timeout_s))) is None:
                pass
        except Empty:
            return None
        return event

    def post(self, event: protocol.Event) -> None:
        """Add an event of the coordinator. Safe from any thread and from signal handlers."""
        self.inbox.put(event)

    def collect(self, step: int, holders: Sequence[int]) -> list[Part]:
        """Return the sums of a step, and kept results not added yet."""
        parts = []
        for sums in dict.fromkeys([self._sums[worker] for worker in holders]):
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

    def _lose(self, worker: int, error: Exception) -> None:
        """End the request, if any, of a worker that has ended."""
        if worker in self.requests:
            request = self._end(worker)
            self._errors[worker, request.step, request.shard] = error

    # --- the ways of an engine --------------------------------------------------------------------

    @abstractmethod
    def _request(self, effect: protocol.Compute, request: Request) -> None:
        """Pass a request to its worker. Does not block."""

    def _event_of(self, news: Any) -> protocol.Event | None:
        """Return the event of an object of the inbox; None: there is no event.

        An answer is a tuple with the arguments of ``_answered``.
        """
        return self._answered(*news) if isinstance(news, tuple) else news

    def _decided(self, worker: int) -> None:
        """Add a worker's kept results, now or later."""
        self._sums[worker].add_kept()

    def _cancel(self, worker: int, request: Request) -> None:  # noqa: ARG002
        """Have a worker abandon a request. Does not block."""
        request.is_cancelled = True

    def _replace(self, worker: int, reason: str) -> None:
        """Kill a worker, and start a new worker. Does not block."""
        raise NotImplementedError
