"""A worker process of a relay's node: orders, answers, and speculative shards.

Between a worker's answer and its next order lies a round trip, and the result travels before. So a
relay has a worker begin the shard that is likely to follow, with the same parameters, at once. If
the next order is for this speculative shard, the shard is under way by then, or done. If not, the
shard is cancelled without an answer to the coordinator.

Results of a node's workers for one step are added where their shards make up a subtree. A result
waits for further results of its step as long as half of its computation took. The sum has the bits
of any sum along the tree of shards, and leaves the node once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from quorate.coordination.ownership import together
from quorate.coordination.tree import tree_sum
from quorate.engines.processes import worker_messages as messages
from quorate.engines.processes.arena import Arena
from quorate.engines.processes.pool import WorkerHandle
from quorate.engines.ray.images import KillProcess, WireCut, WorkerEnded
from quorate.machine.limits import NODE_SUM_S, RANK_POLL_S
from quorate.machine.resources import oom_kills
from quorate.machine.shared_memory import Segment
from quorate.replica.shard_sum import ShardSum

if TYPE_CHECKING:
    from quorate.engines.ray.relay_actor import RelayActor


PATIENCE = 0.5  # the wait of a result for siblings, relative to the time of its computation


class WorkerResult(NamedTuple):
    """The result of a shard, in a slot of the node's arena."""

    worker: RelayedWorker
    order: messages.ComputeShards
    answer: messages.ShardsDone
    slot: int


@dataclass
class _NodeShard:
    """A shard of a step on this node, from the first order until the result is passed on."""

    # By worker, monotonic: several workers of a node may compute one shard.
    ordered_at: dict[RelayedWorker, float] = field(default_factory=dict)
    result: WorkerResult | None = None  # the first
    until: float = inf  # the end of the wait of the result


class NodeSums:
    """The results of the workers of a node that wait for each other."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int], dict[int, _NodeShard]] = {}  # by job and step

    def ordered(self, worker: RelayedWorker, order: messages.ComputeShards) -> None:
        """Note that a worker computes a shard."""
        if order.leaves > 1:
            step = self._steps.setdefault((order.job, order.step), {})
            shard = step.setdefault(order.shard, _NodeShard())
            shard.ordered_at.setdefault(worker, time.monotonic())

    def lost(self, worker: RelayedWorker, order: messages.ComputeShards) -> None:
        """Note that a worker will not have computed a shard.

        A result of the same shard by a second worker goes on waiting for siblings.
        """
        shard = self._steps.get((order.job, order.step), {}).get(order.shard)
        if shard is None or shard.ordered_at.pop(worker, None) is None:
            return
        if not shard.ordered_at and shard.result is None:
            self._drop((order.job, order.step), [order.shard])

    def done(self, result: WorkerResult) -> bool:
        """Have a result wait for siblings; return False if there are none to wait for."""
        order, now = result.order, time.monotonic()
        shard = self._steps.get((order.job, order.step), {}).get(order.shard, _NodeShard())
        ordered_at = shard.ordered_at.get(result.worker)
        if ordered_at is None or shard.result is not None:  # alone, or a copy that came second
            return False
        shard.result, shard.until = result, now + min(PATIENCE * (now - ordered_at), NODE_SUM_S)
        return True

    def hurry(self, worker: RelayedWorker) -> None:
        """Have results of a worker wait for siblings no more."""
        for shard in (shard for step in self._steps.values() for shard in step.values()):
            if shard.result is not None and shard.result.worker is worker:
                shard.until = 0.0

    def ready(self) -> Iterable[list[WorkerResult]]:
        """Yield groups of results to add now: a subtree each, in the order of shards."""
        now = time.monotonic()
        for key, step in list(self._steps.items()):
            waiting = {n: shard.result for n, shard in step.items() if shard.result is not None}
            for number in sorted(waiting):
                if number not in waiting:  # in a group by now
                    continue
                leaves = waiting[number].order.leaves
                group = together(number, step, leaves)
                if not waiting.keys() >= set(group):
                    if now < step[number].until:
                        continue
                    group = together(number, waiting, leaves)
                self._drop(key, group)
                yield [waiting.pop(each) for each in group]

    def due(self) -> float:
        """Return when a result has waited long enough; infinity: no result waits."""
        shards = (shard for step in self._steps.values() for shard in step.values())
        return min((shard.until for shard in shards), default=inf)

    def _drop(self, key: tuple[int, int], shards: Iterable[int]) -> None:
        for shard in shards:
            del self._steps[key][shard]
        if not self._steps[key]:
            del self._steps[key]


def add_up(arena: Arena, results: list[WorkerResult]) -> None:
    """Add the vectors of results of one subtree, in place, in the slot of the first."""
    parts = [((0, each.order.shard), _vectors(arena, each.slot)) for each in results]
    tree_sum(parts, results[0].order.leaves, ShardSum.add, present=len(parts))


def _vectors(arena: Arena, number: int) -> ShardSum:
    """Return the vectors of a shard's result; the remaining sums travel in messages."""
    slot = arena.slot(number)
    return ShardSum(
        weight=0.0,
        metrics={},
        gradient=slot.flat,
        buffers=slot.floats if slot.floats.numel() else None,
        written=slot.written,
    )


@dataclass
class GivenShard:
    """A shard that a worker computes, or has computed before an order of the coordinator."""

    given: messages.ComputeShards  # the order as the worker has it
    slot: int  # of the result
    order: messages.ComputeShards | None  # the coordinator's; None: the shard is speculative
    answer: messages.Answer | None = None  # the worker's, once there
    is_wrong: bool = False  # whether the coordinator has ordered a different shard

    def adopts(self, order: messages.WorkerMessage) -> bool:
        """Take an order for this speculative shard, from the node's values; else return False."""
        if self.order is not None or self.is_wrong or not isinstance(order, messages.ComputeShards):
            return False
        if order.model_changes is not None or order.shared is not None:
            return False
        same = ("job", "step", "shard", "rank_of")
        if any(getattr(order, name) != getattr(self.given, name) for name in same):
            return False
        self.order = order
        return True


class RelayedWorker:
    """A worker process, from the start to the exit. Passes on messages in both directions.

    Args:
        life: names the process.
        process: the process.
        relay: the relay of the node.
    """

    def __init__(self, life: int, process: WorkerHandle, relay: RelayActor) -> None:
        self.life = life
        self.process = process
        self.told_at = 0.0  # when the newest news was told
        self._relay = relay
        # Orders that wait for the answer to the order before, with memory to send along.
        self._orders: deque[tuple[messages.WorkerMessage, list[Segment]]] = deque()
        self._shard: GivenShard | None = None  # the newest, until the coordinator has the answer
        self._slot = 0  # which of the worker's two slots has the newest result
        self._cancelled: int | None = None  # ticket
        self._is_forked = self._is_cut = False
        self._oom_kills = oom_kills()

    def pass_on(self) -> bool:
        """Pass on all that has come, in both directions; return False after the end."""
        process = self.process
        has_ended = process.has_ended()  # messages sent before the end count
        process.flush()
        if process.pid is not None and not self._is_forked:
            self._is_forked = True
            self._relay.say(self, messages.WorkerForked(process.pid))
        for message in process.arrived():
            if isinstance(message, messages.ShardsDone) and message.memory is not None:
                message.memory = message.memory.map[:]  # another host cannot map it
            self._take_message(message)
        if process.is_cut and not self._is_cut:
            self._is_cut = True
            process.deaf()
            self._relay.say(self, WireCut())
        if has_ended:
            ending = process.ending().explained(self._oom_kills)
            self.close()
            self._relay.say(self, WorkerEnded(ending))
            return False
        self._carry_out_orders()
        computes = self._shard is not None and self._shard.answer is None
        if computes and time.monotonic() - self.told_at > RANK_POLL_S:
            self._relay.say(self, None)
        return True

    def close(self) -> None:
        """End the process. Results of the worker are passed on, and no sibling waits for more."""
        given = self._shard.order if self._shard is not None else None
        for order in (given, *(order for order, _ in self._orders)):
            if isinstance(order, messages.ComputeShards):
                self._relay.sums.lost(self, order)
        self._relay.sums.hurry(self)
        self._relay.pass_on_sums()
        self.process.close()

    def take_order(
        self, message: KillProcess | messages.WorkerMessage, segments: list[Segment]
    ) -> None:
        """Carry out an order at once, or note the order until the worker has answered."""
        match message:
            case messages.CancelShards(ticket):
                self._cancelled = ticket
                self._cancel()
                return
            case KillProcess():
                self.process.kill()
                return
            case messages.EndWorker():
                self.process.post(message)
                return
            case messages.ComputeShards():
                self._relay.sums.ordered(self, message)
        self._orders.append((message, segments))

    def doubt(self) -> None:
        """Give up a speculative shard: values of the node have changed."""
        shard = self._shard
        if shard is not None and shard.order is None and not shard.is_wrong:
            if shard.answer is not None:
                self._shard = None
                return
            shard.is_wrong = True
            self._relay.arena.cancelled[self.process.number] = shard.given.ticket

    # --- answers of the worker --------------------------------------------------------------------

    def _take_message(self, message: messages.WorkerMessage) -> None:
        """Take a message of the worker: the answer to a speculative shard may have to wait."""
        shard = self._shard
        if shard is None or not isinstance(message, messages.Answer):
            self._relay.say(self, message)
            return
        shard.answer = message
        if shard.is_wrong:
            self._shard = None
        else:
            self._answer(shard)

    def _answer(self, shard: GivenShard) -> None:
        """Answer the coordinator, once order and answer are there; the worker goes on at once."""
        if shard.order is None or shard.answer is None:
            return
        self._shard = None
        order, answer = shard.order, shard.answer
        answer.ticket = order.ticket
        is_done = isinstance(answer, messages.ShardsDone)
        if is_done and order.following is not None and not self._orders:
            step, first = order.following
            own = {"ticket": -2 - order.ticket, "step": step, "shard": first}
            following = structs.replace(order, **own, model_changes=None, shared=None)
            self._give(following, None, [])
        has_vectors = order.slots != [None]
        if isinstance(answer, messages.ShardsDone):
            has_vectors = has_vectors and not any(each.awaits_totals for each in answer.results)
        if isinstance(answer, messages.ShardsDone) and has_vectors:
            self._relay.take(WorkerResult(self, order, answer, shard.slot))
        else:
            self._relay.sums.lost(self, order)
            self._relay.say(self, answer)

    # --- orders of the coordinator ----------------------------------------------------------------

    def _carry_out_orders(self) -> None:
        """Carry out waiting orders, as far as the worker is free."""
        while self._orders:
            order, segments = self._orders[0]
            if (shard := self._shard) is not None and shard.adopts(order):
                self._orders.popleft()
                self._cancel()
                self._answer(shard)
                continue
            self.doubt()
            if self._shard is not None:
                return
            self._orders.popleft()
            if isinstance(order, messages.ComputeShards):
                self._give(order, order, segments)
                self._cancel()
            else:
                self._relay.send(self, order, segments)

    def _give(
        self,
        given: messages.ComputeShards,
        order: messages.ComputeShards | None,
        segments: list[Segment],
    ) -> None:
        """Have the worker compute a shard, ordered by the coordinator or speculative."""
        self._slot = 1 - self._slot
        slot = 2 * self.process.number + self._slot
        self._shard = GivenShard(given, slot, order)
        slots: list[int | None] = [None] if given.slots == [None] else [slot]
        self._relay.send(self, structs.replace(given, slots=slots), segments)

    def _cancel(self) -> None:
        """Have the worker cancel its newest shard, if the coordinator has cancelled the shard."""
        shard = self._shard
        if shard is not None and shard.order is not None and shard.order.ticket == self._cancelled:
            self._relay.arena.cancelled[self.process.number] = shard.given.ticket
