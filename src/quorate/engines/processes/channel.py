"""One job's conversation with all worker processes: who computes what, and in which slot.

A worker has the slot of a shard until it has answered or ended, the coordinator until the shard's
step is applied. Every call to compute has a ticket, so that an answer finds what it belongs to.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from quorate.coordination.plan import abridged
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
)
from quorate.coordination.tree import Node, TreeSum
from quorate.engines.job import Job, Training, class_name
from quorate.engines.messages import Message
from quorate.engines.processes.arena import Arena
from quorate.engines.processes.results import Result, Running, result_of, summed
from quorate.engines.servers import Held, Servers
from quorate.errors import WorkerError
from quorate.replica.buffers import Buffers
from quorate.replica.shard_sum import Part
from quorate.replica.snapshots import Snapshots


class Owner(Protocol):
    """What a channel needs of the transport."""

    arena: Arena
    tickets: Iterator[int]  # of all jobs, no two alike
    buffers: Buffers

    @property
    def servers(self) -> Servers | None:
        """What has the parameters; None: the coordinator has."""

    def tell(self, worker: int, message: Message) -> None:
        """Send a worker a message. Does not block."""

    def cancel(self, worker: int, ticket: int) -> None:
        """Let a worker leave off what it was given with this ticket. Does not block."""

    def replace(self, worker: int, reason: str) -> None:
        """Kill a worker, and start another in its place."""

    def begin(self, channel: ProcessesChannel) -> None:
        """Begin the channel's job: ask workers to join. Blocks for a shard."""

    def forget(self, channel: ProcessesChannel) -> None:
        """End the channel's job."""

    def pump(self, timeout_s: float | None) -> None:
        """Wait for news of workers, at most so long, and pass on what there is."""

    def wake(self) -> None:
        """Have ``pump`` return. Any thread may."""


class ProcessesChannel:
    """One job's conversation with all workers."""

    def __init__(self, transport: Owner, job: Job, number: int) -> None:
        self.job = job
        self.number = number
        self.has_begun = False
        self._transport = transport
        self._events: deque[Event] = deque()
        self._errors: dict[tuple[int, int, int], BaseException] = {}
        self._running: dict[int, Running] = {}  # worker -> what it computes
        self._ends: Counter[int] = Counter()  # worker -> ends that are reported and not yet heard
        self._pending: dict[tuple[int, int, int], Result] = {}  # neither kept nor discarded
        # By step: what is kept and not yet added, and the sums of the rest.
        self._kept: dict[int, deque[tuple[Node, Result]]] = {}
        self._has: dict[int, set[int]] = {}  # the shards of it that are kept, added or not
        self._sums: dict[int, TreeSum[Result]] = {}
        self._collected: list[Result] = []
        self._is_shown = job.is_shown  # whether workers see the coordinator's buffers as they are
        arena = transport.arena
        self._free = [*arena.lent(again=job.is_again)]  # a heap: low first, so that few are used
        self._snapshots: Snapshots | None = None
        if job.on_snapshots:
            slots = {number: arena.slot(number) for number in arena.snapshots}
            self._snapshots = Snapshots(arena.parameters, transport.buffers, slots)

    def send(self, effect: Compute | Keep | Discard | Cancel | Replace) -> None:
        """Carry out an effect. Does not block."""
        match effect:
            case Compute():
                self._compute(effect)
            case Keep(worker, step, first, count) | Discard(worker, step, first, count):
                for shard in range(first, first + count):
                    self._decide((worker, step, shard), is_kept=isinstance(effect, Keep))
            case Cancel(worker):
                if (running := self._running.get(worker)) is not None:
                    self._transport.cancel(worker, running.ticket)
            case Replace(worker, reason):
                self._transport.replace(worker, reason)

    def receive(self, timeout_s: float | None) -> Event | None:
        """Return the next event, or None after ``timeout_s`` seconds; meanwhile add up sums."""
        if not self.has_begun:
            # Only now: user code that is told of the beginning may change the model, and workers
            # compare what they compute with the coordinator.
            self.has_begun = True
            self._transport.begin(self)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._events:
            step = next((step for step, kept in self._kept.items() if kept), None)
            if step is not None:  # adding can wait, a worker without work cannot
                self._transport.pump(0.0)
                if not self._events:
                    self._sums[step].put(*self._kept[step].popleft())
                continue
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._transport.pump(left_s)
            if not self._events and left_s == 0.0:
                return None
        event = self._events.popleft()
        if isinstance(event, Left):
            self._ends[event.worker] -= 1
        return event

    def now(self) -> float:
        """Return the time of a monotonic clock, in seconds."""
        return time.monotonic()

    def post(self, event: Event) -> None:
        """Add an event of the coordinator's own. Any thread, also a signal handler, may."""
        self._events.append(event)
        self._transport.wake()

    def collect(self, step: int, holders: Sequence[int]) -> list[Part]:  # noqa: ARG002
        """Return the sums of a step. They lie in their slots until ``publish``."""
        del self._has[step]
        parts = [*self._sums.pop(step).parts.items(), *self._kept.pop(step)]
        self._collected = [result for _, result in parts]
        return [(node, result.sum) for node, result in parts]

    def publish(self) -> None:
        """Free the slots of what was collected. Buffers are shown to workers with the next shard.

        User code may change them before. No worker reads them meanwhile.
        """
        for result in self._collected:
            self._give_back(result)
        self._collected = []
        self._is_shown = False
        if self._snapshots is not None:
            self._snapshots.renew()

    def error(self, worker: int, step: int, shard: int) -> BaseException:
        """Return what was raised in a shard, or how its worker ended."""
        return self._errors[worker, step, shard]

    def close(self) -> None:
        """End the job, and free its slots' views."""
        self._transport.forget(self)
        # It adds by a method of this object, which would keep the slots until the next collection.
        self._sums.clear()
        self._pending.clear()
        self._kept.clear()
        self._collected.clear()

    def invitation(self) -> Message:
        """Return what a worker is told of the job when it is asked to join."""
        job = self.job
        return {
            "kind": "open",
            "job": self.number,
            "work": class_name(type(job)),
            "averaged": job.parameters is self._transport.arena.average,
            "plan": job.plan.to_json(),
            "steps": [job.steps.start, job.steps.stop],
            "options": job.options(),
            **self._traced(),
        }

    def _traced(self) -> Message:
        if self.job.trace is None or not (steps := self.job.trace.steps_of(self.job)):
            return {}
        return {"traced": [steps.start, steps.stop]}

    def is_computing(self, worker: int) -> bool:
        """Return whether a worker was given a shard and has not answered."""
        return worker in self._running

    def computing(self) -> list[int]:
        """Return the workers that were given a shard and have not answered."""
        return list(self._running)

    # --- what the transport reports ---------------------------------------------------------------

    def joined(self, worker: int, place: str = "") -> None:
        """Report that a worker takes part."""
        self._events.append(Joined(worker, place))

    def left(self, worker: int, reason: str, *, crashed: bool) -> None:
        """Report that a worker is gone; the shard that it computed is lost, its results are not."""
        running = self._running.pop(worker, None)
        if running is not None:
            step, shard = running.step, running.shard
            self._end(worker, running)  # it is gone, and reads and writes no more
            rows = abridged(self.job.plan.shard(step, shard))
            text = f"{reason}; it computed {self.job.place(step, shard)}, rows {rows}"
            ahead = self._transport.arena.loaded_ahead(worker)
            if ahead is not None and ahead != (step, shard):
                rows = abridged(self.job.plan.shard(*ahead))
                text += (
                    f", and loaded rows {rows} of {self.job.place(*ahead)} ahead: the one "
                    "or the other may be to blame"
                )
            self._errors[worker, step, shard] = WorkerError(text)
        self._ends[worker] += 1
        crashed = crashed and running is not None
        self._events.append(Left(worker, reason, crashed=crashed, results_stay=True))

    def answered(self, worker: int, message: Message) -> None:
        """Take in what a worker says of the shard that it was given."""
        if (trace := self.job.trace) is not None:
            for number, own in message.get("group", [(worker, message)]):
                if (spans := own.pop("spans", None)) is not None:
                    trace.take_batch(number, spans)
        match message["kind"]:
            case "done":
                self.done(worker, message)
            case "left off":
                self.left_off(worker, message)
            case "failed":
                self.failed(worker, message)

    def done(self, worker: int, message: Message) -> None:
        """Take in a shard that is computed; its result lies in the slot that was lent for it.

        Or take in a group of shards of one step that were added before they came, in their order:
        the sum lies in this worker's slot. All of them are in their step's sum, or none is, and
        they have to come apart.
        """
        group = message.get("group", [(worker, message)])
        if len(group) > 1 and not all(self._will_count(*each) for each in group):
            message["apart"]()
            return
        if not self._is_expected(worker, message):
            return
        if (more := message.get("more")) is not None:
            self._take_run(worker, message, more)
            return
        slot = self._running[worker].slot
        for place, (number, own) in enumerate(group):
            self._take(number, own, slot, has_vectors=place == 0)  # the others are added to it

    def _take_run(self, worker: int, message: Message, more: Sequence[Message]) -> None:
        """Take in a run of shards, each with its result in a slot of its own."""
        running = self._running.pop(worker)
        self._end(worker, running._replace(slot=None, more=()))
        slots = (running.slot, *running.more)
        sums = summed(message, self.job.plan.shards_of(running.step))
        for place, (own, slot) in enumerate(zip((message, *more), slots, strict=True)):
            ticket = (worker, running.step, running.shard + place)
            result = result_of(self._transport.arena, ticket, own, slot)
            summed_in = sums.get(ticket[2])
            self._pending[ticket] = summed_in.part(ticket[2], result) if summed_in else result
        self._events.append(Done(worker, running.step, running.shard))

    def _will_count(self, worker: int, message: Message) -> bool:
        """Return whether a shard of a step that needs all of them will be in its sum."""
        if not self._is_expected(worker, message):
            return False
        step, shard = self._running[worker].step, self._running[worker].shard
        others = ((t, s) for _, t, s in self._pending)
        return shard not in self._has.get(step, ()) and (step, shard) not in others

    def _take(self, worker: int, message: Message, held: int | None, *, has_vectors: bool) -> None:
        """Take in a shard whose result, or a sum that it is in, lies in the slot of this number."""
        running = self._running.pop(worker)
        self._end(worker, running, keep_slot=running.slot == held)
        ticket = (worker, running.step, running.shard)
        self._pending[ticket] = result_of(
            self._transport.arena, ticket, message, held if has_vectors else None
        )
        self._events.append(Done(*ticket))

    def failed(self, worker: int, message: Message) -> None:
        """Take in what user code raised in a shard."""
        if not self._is_expected(worker, message):
            return
        running = self._running.pop(worker)
        step, shard = running.step, message.get("shard", running.shard)
        self._end(worker, running)
        self._errors[worker, step, shard] = message["error"]
        self._events.append(Failed(worker, step, shard))

    def left_off(self, worker: int, message: Message) -> None:
        """Take in that a shard was cancelled in time."""
        if not self._is_expected(worker, message):
            return
        running = self._running.pop(worker)
        self._end(worker, running)
        self._events.append(Cancelled(worker, running.step, running.shard))

    def _is_expected(self, worker: int, message: Message) -> bool:
        running = self._running.get(worker)
        return running is not None and running.ticket == message["ticket"]

    # --- slots ------------------------------------------------------------------------------------

    def _compute(self, effect: Compute) -> None:
        if self._ends[effect.worker]:
            return  # the coordinator will hear next that it has left, and deal the shard again
        ticket = next(self._transport.tickets)
        has_slots = self.job.has_gradients(effect.step)
        slots = [heapq.heappop(self._free) if has_slots else None for _ in range(effect.count)]
        slot, *more = slots
        snapshot = None if self._snapshots is None else self._snapshots.lend(effect.worker)
        if snapshot is None and isinstance(self.job, Training) and not self._is_shown:
            self._transport.arena.publish(self._transport.buffers)
            self._is_shown = True
        self._running[effect.worker] = Running(ticket, effect.step, effect.shard, slot, tuple(more))
        run: Message = {"more": more} if more else {}  # slots of the shards after the first
        shards = range(effect.shard, effect.shard + effect.count)
        beside = [self.job.beside(effect.step, shard) for shard in shards]
        if any(beside):
            run["beside"] = beside
        self._transport.tell(
            effect.worker,
            {
                "kind": "compute",
                "job": self.number,
                "ticket": ticket,
                "step": effect.step,
                "shard": effect.shard,
                "slot": slot,
                "snapshot": snapshot and [snapshot.number, snapshot.version],
                "rank_of": effect.rank_of,
                "is_needed": effect.is_needed,
                **run,
            },
        )

    def _end(self, worker: int, running: Running, *, keep_slot: bool = False) -> None:
        """Take back what a worker had for a shard that it computes no longer."""
        if self._snapshots is not None:
            self._snapshots.give_back(worker)
        if not keep_slot:
            for slot in (running.slot, *running.more):
                self._free_slot(slot)

    def _decide(self, ticket: tuple[int, int, int], *, is_kept: bool) -> None:
        result, (_, step, shard) = self._pending.pop(ticket), ticket
        results = [(shard, result)]
        if (within := result.within) is not None:
            results, is_kept = within.decide(shard, result, is_kept=is_kept)
            if is_kept and results and step in self._sums:
                for other in within.taken_out(self._kept[step], self._sums[step]):
                    self._give_back(other)
        for shard, each in results:
            if is_kept:
                self._keep(step, shard, each)
            else:
                self._give_back(each)

    def _keep(self, step: int, shard: int, result: Result) -> None:
        leaves, gradient = self.job.plan.shards_of(step), result.sum.gradient
        if isinstance(gradient, Held) and self._transport.servers is not None:
            self._transport.servers.keep(gradient.ticket, step, shard, leaves)
        if step not in self._sums:
            self._kept[step] = deque()
            self._has[step] = set()
            self._sums[step] = TreeSum(leaves, self._add)
        self._kept[step].append(((0, shard), result))
        self._has[step].add(shard)

    def _add(self, left: Result, right: Result) -> Result:
        left.sum.add(right.sum)
        self._give_back(right)
        return left

    def _give_back(self, result: Result) -> None:
        self._free_slot(result.slot)

    def _free_slot(self, number: int | None) -> None:
        if number is not None:
            heapq.heappush(self._free, number)
