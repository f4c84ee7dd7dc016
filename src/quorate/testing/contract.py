"""The contract of engines, as a test for any engine.

The coordinator and the training loop rely on the contract: see ``quorate.engines``. A violation
raises ``ContractError`` with the clause and the actual behavior.

Legend: V shards of a step, N workers, t step, s shard, w worker.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from quorate.coordination import protocol
from quorate.coordination.tree import tree_sum
from quorate.engines import Channel, Transport, WrappedTransport
from quorate.engines.job import Job, Training
from quorate.engines.worker_status import PHASES, WorkerStatus
from quorate.errors import QuorateError
from quorate.replica.fingerprint import fingerprint
from quorate.replica.shard_sum import ShardSum
from quorate.training.observer import observing
from quorate.training.state import State

PAUSE_S = 0.05


class ContractError(QuorateError, AssertionError):
    """An engine violates the contract."""


def check_engine(
    transport: Transport,
    job: Training,
    *,
    fails: tuple[int, int] | None = None,
    kill: Callable[[int], None] | None = None,
    limit_s: float = 60.0,
) -> list[str]:
    """Check an engine against the contract, and return the checked clauses.

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
        ContractError: the engine violates the contract.
        ValueError: the job is too small for this check.
    """
    if len(job.steps) < 2:
        raise ValueError(f"got a job of {len(job.steps)} steps, expected at least 2")
    conversation = _Conversation(transport, job, fails, kill, limit_s)
    checked = []
    for clause, (check, applies) in CLAUSES.items():
        if applies(conversation):
            conversation.begin(clause)
            try:
                check(conversation)
            finally:
                conversation.channel.close()
            checked.append(clause)
    return checked


check_transport = check_engine  # the former name


@contextmanager
def checking_transport(**options: Any) -> Iterator[list[str]]:
    """Check the engine of each training loop within the block, before the first update.

    Args:
        options: keyword arguments for ``check_engine``.

    Yields:
        A list of the clauses of the contract that were checked so far.
    """
    checked: list[str] = []

    def check(transport: Transport, _state: State, _facts: Mapping[str, Any]) -> Transport:
        return _CheckedTransport(transport, checked, options)

    with observing(check):
        yield checked


class _CheckedTransport(WrappedTransport):
    """A ``Transport`` with a check at the beginning of the training."""

    def __init__(self, inner: Transport, checked: list[str], options: Mapping[str, Any]) -> None:
        super().__init__(inner)
        self._checked = checked
        self._options = options

    def open(self, job: Job) -> Channel:
        if isinstance(job, Training):
            self._checked += check_engine(self._inner, job, **self._options)
        return super().open(job)


@dataclass(eq=False)
class _Conversation:
    """A conversation with all workers about a clause; the clauses share the job's first step, t.

    A clause begins when all workers of a new channel have joined.
    """

    transport: Transport
    job: Training
    fails: tuple[int, int] | None
    kill: Callable[[int], None] | None
    limit_s: float
    channel: Channel = field(init=False)
    workers: list[int] = field(default_factory=list)  # sorted
    _clause: str = ""
    _events: list[protocol.Event] = field(default_factory=list)
    _fingerprints: dict[int, str] = field(default_factory=dict)  # by step, t or t + 1: of its sum

    def __post_init__(self) -> None:
        self.t = self.job.steps[0]
        self.shards = self.job.plan.shards_of(self.t)

    # --- the channel ------------------------------------------------------------------------------

    def begin(self, clause: str) -> None:
        """Open a channel for a clause, and wait for all workers."""
        self._clause = clause
        # A copy: a replica remembers the job and the step whose parameters the replica has.
        self.channel = self.transport.open(copy.copy(self.job))
        self.workers, self._events = [], []
        for _ in self.transport.status():
            event = self.receive()
            if not isinstance(event, protocol.Joined) or event.worker in self.workers:
                raise self.broken(f"got {event}, expected that each worker joins once")
            self.workers.append(event.worker)
        self.workers.sort()

    def restart(self) -> None:
        """Close the channel, and open a new one."""
        self.channel.close()
        self.begin(self._clause)

    # --- events -----------------------------------------------------------------------------------

    def broken(self, text: str) -> ContractError:
        """Return the error of a broken clause, with the last events."""
        trail = "\n".join(f"  {event}" for event in self._events[-20:])
        return ContractError(f"{self._clause}: {text}\nlast events, oldest first:\n{trail}")

    def receive(self) -> protocol.Event:
        """Return the next event."""
        deadline = time.monotonic() + self.limit_s
        while time.monotonic() < deadline:
            if (event := self.channel.receive(1.0)) is not None:
                self._events.append(event)
                return event
        raise self.broken(f"no event within {self.limit_s:g} s")

    def expect(self, *expected: protocol.Event) -> protocol.Event:
        """Return the next event; raise an error unless it is among the expected events."""
        if (event := self.receive()) not in expected:
            raise self.broken(f"got {event}, expected {' or '.join(map(str, expected))}")
        return event

    def expect_nothing(self) -> None:
        """Check that no event comes for a moment."""
        if (event := self.channel.receive(PAUSE_S)) is not None:
            raise self.broken(f"got {event}, expected that nothing happens for a moment")

    # --- shards -----------------------------------------------------------------------------------

    def send_shard(self, worker: int, step: int, shard: int) -> None:
        """Have a worker begin a shard."""
        rank_of = (self.workers.index(worker), len(self.workers))
        self.channel.send(protocol.Compute(worker, step, shard, self._clause, rank_of))

    def compute(self, worker: int, step: int, shard: int) -> None:
        """Have a worker compute a shard, and wait for the answer."""
        self.send_shard(worker, step, shard)
        self.expect(protocol.Done(worker, step, shard))

    def compute_step(
        self, workers: Sequence[int], step: int, shards: Iterable[int] | None = None
    ) -> None:
        """Have workers compute and keep shards of a step, by default all, side by side."""
        left = list(range(self.job.plan.shards_of(step)) if shards is None else shards)
        while left:
            dealt = list(zip(workers, left, strict=False))
            left = left[len(dealt) :]
            for worker, shard in dealt:
                self.send_shard(worker, step, shard)
            waiting: list[protocol.Event] = [
                protocol.Done(worker, step, shard) for worker, shard in dealt
            ]
            while waiting:
                event = self.expect(*waiting)
                waiting.remove(event)
                assert isinstance(event, protocol.Done)  # kept at once, while others still compute
                self.channel.send(protocol.Keep(event.worker, step, event.shard))

    def collect(self, step: int, holders: Sequence[int]) -> str:
        """Return a fingerprint of the sum of all kept shards of a step; publish."""
        shards = self.job.plan.shards_of(step)
        try:
            total = tree_sum(self.channel.collect(step, holders), shards, ShardSum.add)
        except ValueError as error:
            raise self.broken(f"got parts of another step or of no tree: {error}") from error
        text = _text(total)
        self.channel.publish()
        return text

    def check_sum(self, holders: Sequence[int], step: int) -> None:
        """Collect the sum of a step, and compare the bits with earlier sums of the step."""
        text = self.collect(step, holders)
        if self._fingerprints.setdefault(step, text) != text:
            raise self.broken(f"the sum of step {step} on workers {list(holders)} has other bits")

    def check_step(
        self, workers: Sequence[int], step: int, shards: Iterable[int] | None = None
    ) -> None:
        """Have workers compute shards of a step, and check the sum of all shards."""
        self.compute_step(workers, step, shards)
        self.check_sum(workers[: self.shards], step)


def _text(value: ShardSum) -> str:
    vectors = [] if value.gradient is None else value.gradient.vectors
    return fingerprint((value.weight, value.metrics, vectors, value.buffers, value.integer_buffers))


# --- the clauses ----------------------------------------------------------------------------------


Check = Callable[[_Conversation], None]
Condition = Callable[[_Conversation], bool]  # whether the engine and the job are of a kind
CLAUSES: dict[str, tuple[Check, Condition]] = {}  # by text


def _clause(text: str, applies: Condition = lambda _: True) -> Callable[[Check], None]:
    """Return a decorator for the function with the check of a clause."""

    def add(check: Check) -> None:
        CLAUSES[text] = check, applies

    return add


@_clause("every worker joins once, and nothing happens by itself")
def _nothing_happens(c: _Conversation) -> None:
    c.expect_nothing()


@_clause("any thread may ask for the status, a row for each worker")
def _status_of_each(c: _Conversation) -> None:
    rows: list[WorkerStatus] = []
    asking = threading.Thread(target=lambda: rows.extend(c.transport.status()))
    asking.start()
    asking.join(c.limit_s)
    if [row.number for row in rows] != c.workers:
        raise c.broken(f"got {rows}, expected a row for each of {c.workers}, in order")
    if unknown := {row.phase for row in rows} - set(PHASES):
        raise c.broken(f"got phases {unknown}, expected some of {PHASES}")


@_clause("a shard has the same bits on every worker")
def _same_bits(c: _Conversation) -> None:
    for worker in list(c.workers):
        c.restart()
        for step in (c.t, c.t + 1):
            c.check_step([worker], step)


@_clause("a sum has the same bits, whoever computes which shard")
def _any_split(c: _Conversation) -> None:
    c.check_step(c.workers, c.t)


@_clause("parts are collected from those alone who hold some")
def _one_holder(c: _Conversation) -> None:
    c.check_step(c.workers[-1:], c.t)


@_clause("shards dealt in one run have the bits of single ones", lambda c: c.transport.takes_runs)
def _runs(c: _Conversation) -> None:
    run, count = (c.workers[-1], c.t, 0), c.shards
    c.channel.send(protocol.Compute(*run, "a run", count=count))
    c.expect(protocol.Done(*run))
    c.channel.send(protocol.Keep(*run, count))
    c.check_sum(c.workers[-1:], c.t)


@_clause("what is discarded is in no sum, and may be computed again")
def _discarded(c: _Conversation) -> None:
    for worker in c.workers[:2]:
        c.compute(worker, c.t, 0)
        c.channel.send(protocol.Discard(worker, c.t, 0))
    c.check_step(c.workers, c.t)


@_clause("what is collected is valid until publish")
def _valid_until_publish(c: _Conversation) -> None:
    holder, other = c.workers[0], c.workers[-1]
    c.compute_step([holder], c.t)
    c.send_shard(other, c.t + 1, 0)
    parts = c.channel.collect(c.t, [holder])
    before = [_text(value) for _, value in parts]
    c.expect(protocol.Done(other, c.t + 1, 0))
    if [_text(value) for _, value in parts] != before:
        raise c.broken("a result that was collected changed before it was published")
    c.channel.publish()
    c.channel.send(protocol.Discard(other, c.t + 1, 0))


@_clause("what is sent after publish is computed from the parameters as they are then")
def _published(c: _Conversation) -> None:
    old, new, again = [_after_an_update(c, factor) for factor in (1.0, 0.5, 1.0)]
    if new == old:
        raise c.broken("the parameters were changed, and what was computed from them was not")
    if again != old:
        raise c.broken("the parameters were changed back, and what was computed was not")


def _after_an_update(c: _Conversation, factor: float) -> str:
    """Return the sum of step t + 1 after a multiplication of the parameters; undo the latter."""
    c.restart()
    vectors = c.job.parameters.vectors
    saved = [vector.clone() for vector in vectors]
    c.compute_step(c.workers, c.t)
    c.channel.collect(c.t, c.workers[: c.shards])
    try:
        for vector in vectors:
            vector.mul_(factor)
        c.channel.publish()
        c.compute_step(c.workers[:1], c.t + 1)
        return c.collect(c.t + 1, c.workers[:1])
    finally:
        for vector, values in zip(vectors, saved, strict=True):
            vector.copy_(values)


@_clause("who is told to leave off does, or is done, and goes on")
def _cancelled(c: _Conversation) -> None:
    worker = c.workers[0]
    c.send_shard(worker, c.t, 0)
    c.channel.send(protocol.Cancel(worker, c.t, 0))
    if isinstance(
        c.expect(protocol.Cancelled(worker, c.t, 0), protocol.Done(worker, c.t, 0)), protocol.Done
    ):
        c.channel.send(protocol.Discard(worker, c.t, 0))
    # Another shard: a cancelled shard is not dealt again.
    c.check_step([worker], c.t + 1)


@_clause("who was told too late to leave off goes on all the same")
def _cancelled_too_late(c: _Conversation) -> None:
    worker = c.workers[0]
    c.compute(worker, c.t, 0)
    c.channel.send(protocol.Cancel(worker, c.t, 0))
    c.channel.send(protocol.Discard(worker, c.t, 0))
    c.check_step([worker], c.t + 1)


@_clause("any thread may post an event, which ends a wait")
def _posted(c: _Conversation) -> None:
    event = protocol.Stop("another thread")
    posting = threading.Timer(PAUSE_S, c.channel.post, [event])
    posting.start()
    received = c.channel.receive(None)
    posting.join()
    if received != event:
        raise c.broken(f"got {received}, expected {event}")


@_clause("receive returns when its time is over, by now()")
def _time_passes(c: _Conversation) -> None:
    before = c.channel.now()
    c.expect_nothing()
    if (passed_s := c.channel.now() - before) < 0.9 * PAUSE_S:
        raise c.broken(f"got {passed_s:g} s by now(), expected {PAUSE_S:g} s")


@_clause("a job that is closed while shards are computed leaves nothing behind")
def _closed(c: _Conversation) -> None:
    for worker in c.workers:
        c.send_shard(worker, c.t, 0)
    c.restart()
    c.check_step(c.workers, c.t)


@_clause("what user code raises is kept, and its worker goes on", lambda c: c.fails is not None)
def _failed(c: _Conversation) -> None:
    assert c.fails is not None
    worker, (step, shard) = c.workers[0], c.fails
    c.send_shard(worker, step, shard)
    c.expect(protocol.Failed(worker, step, shard))
    if not isinstance(error := c.channel.error(worker, step, shard), BaseException):
        raise c.broken(f"got {error!r} of error(), expected what was raised")
    c.check_step([worker], c.t)


@_clause("who is killed leaves once, and is back", lambda c: c.kill is not None)
def _killed(c: _Conversation) -> None:
    assert c.kill is not None
    _check_ended(c, c.kill)


@_clause("who is replaced leaves once, and is back", lambda c: c.transport.can_replace)
def _replaced(c: _Conversation) -> None:
    _check_ended(
        c, lambda worker: c.channel.send(protocol.Replace(worker, "to check the transport"))
    )


def _check_ended(c: _Conversation, end: Callable[[int], None]) -> None:
    """End a worker during a shard; check ``Left``, ``Joined`` and the next shards."""
    worker = c.workers[0]
    c.compute_step([worker], c.t, range(1, c.shards))
    c.send_shard(worker, c.t, 0)
    end(worker)
    event = c.receive()
    if event == protocol.Done(worker, c.t, 0):  # the worker was faster
        c.channel.send(protocol.Discard(worker, c.t, 0))
        event = c.receive()
    if not isinstance(event, protocol.Left) or event.worker != worker:
        raise c.broken(f"got {event}, expected that worker {worker} leaves")
    c.expect(protocol.Joined(worker))
    # The results are still there, or all shards are to be computed again.
    c.check_step([worker], c.t, range(1 if event.results_stay else c.shards))
