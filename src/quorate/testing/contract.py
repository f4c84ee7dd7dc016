"""The contract of engines, as a test for any engine.

The contract is what the coordinator and the training loop rely on: see ``quorate.engines``. A
violation raises ``ContractError`` with the clause and the actual behavior.

Legend: V shards of a step, N workers, t step, s shard, w worker.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager

from quorate.coordination.protocol import (
    Cancel,
    Cancelled,
    Compute,
    Discard,
    Done,
    Event,
    Failed,
    Joined,
    Keep,
    Left,
    Replace,
    Stop,
)
from quorate.coordination.tree import tree_sum
from quorate.engines import Channel, Transport
from quorate.engines.job import Training
from quorate.engines.worker_status import PHASES, WorkerStatus
from quorate.errors import QuorateError
from quorate.replica.fingerprint import fingerprint
from quorate.replica.shard_sum import ShardSum

PAUSE_S = 0.05


class ContractError(QuorateError, AssertionError):
    """A transport violates the contract."""


def check_transport(
    transport: Transport,
    job: Training,
    *,
    fails: tuple[int, int] | None = None,
    kill: Callable[[int], None] | None = None,
    limit_s: float = 60.0,
) -> list[str]:
    """Check that a transport keeps the contract, and return the clauses that were checked.

    Opens and closes several jobs, one after the other. Afterwards the transport is still open and
    the parameters are unchanged. Blocks for about the time of 10 V shards, plus the start of
    replaced workers.

    Args:
        transport: a transport without an open job.
        job: a job of at least two steps. With one shard per step, sums over several workers are not
            checked.
        fails: step and shard of the job in which user code raises, if any.
        kill: a function that ends a worker from outside, if possible.
        limit_s: longest wait for an answer, in seconds.

    Raises:
        ContractError: the transport violates the contract.
        ValueError: the job is too small for this check.
    """
    if len(job.steps) < 2:
        raise ValueError(f"got a job of {len(job.steps)} steps, expected at least 2")
    check = _Check(transport, job, fails, kill, limit_s)
    for clause in CLAUSES:
        clause(check)
    return check.tried


class _Conversation:
    """One job's, from the moment on that all workers have joined."""

    def __init__(
        self, channel: Channel, clause: str, job: Training, workers: int, limit_s: float
    ) -> None:
        self.channel = channel
        self.workers: list[int] = []
        self.events: list[Event] = []
        self._clause = clause
        self._job = job
        self._limit_s = limit_s
        while len(self.workers) < workers:
            event = self.receive()
            if not isinstance(event, Joined) or event.worker in self.workers:
                raise self.broken(f"got {event}, expected that each worker joins once")
            self.workers.append(event.worker)
        self.workers.sort()

    def broken(self, text: str) -> ContractError:
        """Return what to raise."""
        trail = "\n".join(f"  {event}" for event in self.events[-20:])
        return ContractError(f"{self._clause}: {text}\nlast events, oldest first:\n{trail}")

    def receive(self) -> Event:
        """Return the next event."""
        deadline = time.monotonic() + self._limit_s
        while time.monotonic() < deadline:
            if (event := self.channel.receive(1.0)) is not None:
                self.events.append(event)
                return event
        raise self.broken(f"no event within {self._limit_s:g} s")

    def expect(self, *expected: Event) -> Event:
        """Return the next event, which is one of these."""
        if (event := self.receive()) not in expected:
            raise self.broken(f"got {event}, expected {' or '.join(map(str, expected))}")
        return event

    def expect_nothing(self) -> None:
        if (event := self.channel.receive(PAUSE_S)) is not None:
            raise self.broken(f"got {event}, expected that nothing happens for a moment")

    def send_shard(self, worker: int, step: int, shard: int) -> None:
        """Have a worker begin a shard."""
        rank_of = (self.workers.index(worker), len(self.workers))
        self.channel.send(Compute(worker, step, shard, self._clause, rank_of))

    def compute(self, worker: int, step: int, shard: int) -> None:
        """Have a worker compute a shard, and wait until it has."""
        self.send_shard(worker, step, shard)
        self.expect(Done(worker, step, shard))

    def compute_step(
        self, workers: Sequence[int], step: int, shards: Iterable[int] | None = None
    ) -> None:
        """Have workers compute and keep shards of a step, by default all, side by side."""
        left = list(range(self._job.plan.shards_of(step)) if shards is None else shards)
        while left:
            dealt = list(zip(workers, left, strict=False))
            left = left[len(dealt) :]
            for worker, shard in dealt:
                self.send_shard(worker, step, shard)
            waiting: list[Event] = [Done(worker, step, shard) for worker, shard in dealt]
            while waiting:
                event = self.expect(*waiting)
                waiting.remove(event)
                assert isinstance(event, Done)  # kept at once, while others still compute
                self.channel.send(Keep(event.worker, step, event.shard))

    def collect(self, step: int, holders: Sequence[int]) -> str:
        """Return a fingerprint of the sum of all shards of a step that are kept; publish."""
        shards = self._job.plan.shards_of(step)
        try:
            total = tree_sum(self.channel.collect(step, holders), shards, ShardSum.add)
        except ValueError as error:
            raise self.broken(f"got parts of another step or of no tree: {error}") from error
        text = _text(total)
        self.channel.publish()
        return text


def _text(value: ShardSum) -> str:
    vectors = [] if value.gradient is None else value.gradient.vectors
    return fingerprint((value.weight, value.metrics, vectors, value.buffers, value.integer_buffers))


class _Check:
    """The clauses, one method each. They share the job's first step, t, and what it must yield."""

    def __init__(
        self,
        transport: Transport,
        job: Training,
        fails: tuple[int, int] | None,
        kill: Callable[[int], None] | None,
        limit_s: float,
    ) -> None:
        self.tried: list[str] = []
        self._transport = transport
        self._job = job
        self._fails = fails
        self._kill = kill
        self._limit_s = limit_s
        self._workers = len(transport.status())
        self._t = job.steps[0]
        self._shards = job.plan.shards_of(self._t)
        self._expected: dict[int, str] = {}  # step, t or t + 1, -> fingerprint of its sum

    @contextmanager
    def _conversation(self, clause: str) -> Iterator[_Conversation]:
        if clause not in self.tried:
            self.tried.append(clause)
        # A copy: a replica remembers of which job's which step the parameters are that it has.
        with closing(self._transport.open(copy.copy(self._job))) as channel:
            yield _Conversation(channel, clause, self._job, self._workers, self._limit_s)

    def _expect_sum(
        self, c: _Conversation, holders: Sequence[int], step: int | None = None
    ) -> None:
        step = self._t if step is None else step
        text = c.collect(step, holders)
        if self._expected.setdefault(step, text) != text:
            raise c.broken(f"the sum of step {step} on workers {list(holders)} has other bits")

    # --- clauses ----------------------------------------------------------------------------------

    def everyone_joins(self) -> None:
        with self._conversation("every worker joins once, and nothing happens by itself") as c:
            c.expect_nothing()

    def anyone_may_ask(self) -> None:
        with self._conversation("any thread may ask for the status, a row for each worker") as c:
            rows: list[WorkerStatus] = []
            asking = threading.Thread(target=lambda: rows.extend(self._transport.status()))
            asking.start()
            asking.join(self._limit_s)
            if [row.number for row in rows] != c.workers:
                raise c.broken(f"got {rows}, expected a row for each of {c.workers}, in order")
            if unknown := {row.phase for row in rows} - set(PHASES):
                raise c.broken(f"got phases {unknown}, expected some of {PHASES}")

    def same_bits(self) -> None:
        for rank in range(self._workers):
            with self._conversation("a shard has the same bits on every worker") as c:
                for step in (self._t, self._t + 1):
                    c.compute_step(c.workers[rank : rank + 1], step)
                    self._expect_sum(c, c.workers[rank : rank + 1], step)

    def any_split(self) -> None:
        with self._conversation("a sum has the same bits, whoever computes which shard") as c:
            c.compute_step(c.workers, self._t)
            self._expect_sum(c, c.workers[: self._shards])
        with self._conversation("parts are collected from those alone who hold some") as c:
            c.compute_step(c.workers[-1:], self._t)
            self._expect_sum(c, c.workers[-1:])

    def runs(self) -> None:
        if self._transport.takes_runs:
            with self._conversation("shards dealt in one run have the bits of single ones") as c:
                run, count = (c.workers[-1], self._t, 0), self._shards
                c.channel.send(Compute(*run, "a run", count=count))
                c.expect(Done(*run))
                c.channel.send(Keep(*run, count))
                self._expect_sum(c, c.workers[-1:])

    def discarded(self) -> None:
        with self._conversation("what is discarded is in no sum, and may be computed again") as c:
            for worker in c.workers[:2]:
                c.compute(worker, self._t, 0)
                c.channel.send(Discard(worker, self._t, 0))
            c.compute_step(c.workers, self._t)
            self._expect_sum(c, c.workers[: self._shards])

    def valid_until_publish(self) -> None:
        with self._conversation("what is collected is valid until publish") as c:
            holder, other = c.workers[0], c.workers[-1]
            c.compute_step([holder], self._t)
            c.send_shard(other, self._t + 1, 0)
            parts = c.channel.collect(self._t, [holder])
            before = [_text(value) for _, value in parts]
            c.expect(Done(other, self._t + 1, 0))
            if [_text(value) for _, value in parts] != before:
                raise c.broken("a result that was collected changed before it was published")
            c.channel.publish()
            c.channel.send(Discard(other, self._t + 1, 0))

    def published(self) -> None:
        clause = "what is sent after publish is computed from the parameters as they are then"
        with self._conversation(clause) as c:
            old = self._after_an_update(c, 1.0)
        with self._conversation(clause) as c:
            new = self._after_an_update(c, 0.5)
        with self._conversation(clause) as c:
            again = self._after_an_update(c, 1.0)
        if new == old:
            raise c.broken("the parameters were changed, and what was computed from them was not")
        if again != old:
            raise c.broken("the parameters were changed back, and what was computed was not")

    def _after_an_update(self, c: _Conversation, factor: float) -> str:
        """Return what step t + 1 yields after an update that multiplies the parameters; undo it."""
        vectors = self._job.parameters.vectors
        saved = [vector.clone() for vector in vectors]
        c.compute_step(c.workers, self._t)
        c.channel.collect(self._t, c.workers[: self._shards])
        try:
            for vector in vectors:
                vector.mul_(factor)
            c.channel.publish()
            c.compute_step(c.workers[:1], self._t + 1)
            return c.collect(self._t + 1, c.workers[:1])
        finally:
            for vector, values in zip(vectors, saved, strict=True):
                vector.copy_(values)

    def left_off(self) -> None:
        with self._conversation("who is told to leave off does, or is done, and goes on") as c:
            worker = c.workers[0]
            c.send_shard(worker, self._t, 0)
            c.channel.send(Cancel(worker, self._t, 0))
            answers = Cancelled(worker, self._t, 0), Done(worker, self._t, 0)
            if isinstance(c.expect(*answers), Done):
                c.channel.send(Discard(worker, self._t, 0))
            # Another shard: one that is not wanted never is again.
            c.compute_step([worker], self._t + 1)
            self._expect_sum(c, [worker], self._t + 1)

    def told_too_late(self) -> None:
        with self._conversation("who was told too late to leave off goes on all the same") as c:
            worker = c.workers[0]
            c.compute(worker, self._t, 0)
            c.channel.send(Cancel(worker, self._t, 0))
            c.channel.send(Discard(worker, self._t, 0))
            c.compute_step([worker], self._t + 1)
            self._expect_sum(c, [worker], self._t + 1)

    def anyone_may_post(self) -> None:
        with self._conversation("any thread may post an event, which ends a wait") as c:
            event = Stop("another thread")
            posting = threading.Timer(PAUSE_S, c.channel.post, [event])
            posting.start()
            received = c.channel.receive(None)
            posting.join()
            if received != event:
                raise c.broken(f"got {received}, expected {event}")

    def time_passes(self) -> None:
        with self._conversation("receive returns when its time is over, by now()") as c:
            before = c.channel.now()
            c.expect_nothing()
            if (passed_s := c.channel.now() - before) < 0.9 * PAUSE_S:
                raise c.broken(f"got {passed_s:g} s by now(), expected {PAUSE_S:g} s")

    def closed(self) -> None:
        clause = "a job that is closed while shards are computed leaves nothing behind"
        with self._conversation(clause) as c:
            for worker in c.workers:
                c.send_shard(worker, self._t, 0)
        with self._conversation(clause) as c:
            c.compute_step(c.workers, self._t)
            self._expect_sum(c, c.workers[: self._shards])

    def failed(self) -> None:
        if self._fails is None:
            return
        with self._conversation("what user code raises is kept, and its worker goes on") as c:
            worker, (step, shard) = c.workers[0], self._fails
            c.send_shard(worker, step, shard)
            c.expect(Failed(worker, step, shard))
            if not isinstance(error := c.channel.error(worker, step, shard), BaseException):
                raise c.broken(f"got {error!r} of error(), expected what was raised")
            c.compute_step([worker], self._t)
            self._expect_sum(c, [worker])

    def killed(self) -> None:
        if self._kill is not None:
            kill = self._kill
            self._ended("who is killed leaves once, and is back", lambda _, worker: kill(worker))

    def replaced(self) -> None:
        if self._transport.can_replace:
            self._ended(
                "who is replaced leaves once, and is back",
                lambda c, worker: c.channel.send(Replace(worker, "to check the transport")),
            )

    def _ended(self, clause: str, end: Callable[[_Conversation, int], None]) -> None:
        with self._conversation(clause) as c:
            worker = c.workers[0]
            c.compute_step([worker], self._t, range(1, self._shards))
            c.send_shard(worker, self._t, 0)
            end(c, worker)
            event = c.receive()
            if event == Done(worker, self._t, 0):  # it was faster
                c.channel.send(Discard(worker, self._t, 0))
                event = c.receive()
            if not isinstance(event, Left) or event.worker != worker:
                raise c.broken(f"got {event}, expected that worker {worker} leaves")
            c.expect(Joined(worker))
            # What it held is there, or it is not: then it is all to be computed again.
            c.compute_step([worker], self._t, range(1 if event.results_stay else self._shards))
            self._expect_sum(c, [worker])


CLAUSES = (
    _Check.everyone_joins,
    _Check.anyone_may_ask,
    _Check.same_bits,
    _Check.any_split,
    _Check.runs,
    _Check.discarded,
    _Check.valid_until_publish,
    _Check.published,
    _Check.left_off,
    _Check.told_too_late,
    _Check.anyone_may_post,
    _Check.time_passes,
    _Check.closed,
    _Check.failed,
    _Check.killed,
    _Check.replaced,
)
