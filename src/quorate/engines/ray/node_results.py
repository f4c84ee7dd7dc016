"""Results: how what workers of other nodes have computed comes into the coordinator's memory.

A result is an object on its worker's node until it is fetched, or added to others there and fetched
with them. Whoever listens to a worker copies into that worker's slot alone: it is lent until the
listener has ended. What another thread has fetched the coordinator's thread copies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from ray.exceptions import RayError

from quorate.coordination.ownership import together
from quorate.engines.messages import Message
from quorate.engines.processes.arena import Arena, Image
from quorate.engines.ray.images import ArenaPart, Ref, image_of
from quorate.engines.ray.own_node import OwnNode
from quorate.errors import UserError
from quorate.machine.limits import NODE_SUM_S

if TYPE_CHECKING:
    from quorate.engines.ray.worker_handle import RayWorkerHandle


class ShardOrder(NamedTuple):
    """A shard that a worker computes."""

    job: int
    step: int
    shard: int
    slot: int | None  # of the coordinator's arena; None: it yields no vectors
    shards: int  # V of its step, if its result may be added to others on its node, else 1


class _Result(NamedTuple):
    worker: RayWorkerHandle
    message: Message
    slot: int
    ref: Ref


class NodeResults:
    """Of all workers.

    Args:
        arena: the coordinator's.
        node: the coordinator's own.
    """

    def __init__(self, arena: Arena, node: OwnNode) -> None:
        self._arena = arena
        self._node = node
        self._sums = NodeSums[_Result]()

    def ordered(self, worker: RayWorkerHandle, order: ShardOrder) -> None:
        """Note that a worker computes a shard."""
        if order.shards > 1:
            self._sums.ordered(_where(worker, order), order.shard, order.shards, worker)

    def lost(self, worker: RayWorkerHandle, order: ShardOrder) -> None:
        """Note that it will not have computed it."""
        if order.shards > 1:
            self._sums.lost(_where(worker, order), order.shard, worker)

    def done(self, worker: RayWorkerHandle, order: ShardOrder, message: Message, ref: Ref) -> None:
        """Have the worker take its answer when the result is here. Called by who listens to it.

        If results of others are added to it, it takes their answers too. If it is added to others',
        somebody else takes its answer.
        """
        assert order.slot is not None
        own = _Result(worker, message, order.slot, ref)
        group = {order.shard: own}
        if order.shards > 1:
            group = self._sums.done(_where(worker, order), order.shard, own, worker)
        if len(group) > 1:
            try:
                refs = {shard: result.ref for shard, result in group.items()}
                self._fetch(worker.add(refs, order.shards), own.slot)
            except RayError:  # one of the agents is gone: what the others have is there
                self._alone([result for result in group.values() if result is not own])
            else:
                answers = [(each.worker.number, each.message) for each in group.values()]
                apart = partial(self._apart, list(group.values()))
                worker.take({**message, "group": answers, "apart": apart})
                return
        if group:
            part = ArenaPart.REST if message.get("is_held") else ArenaPart.RESULT
            self._fetch(ref, own.slot, part)
            worker.take(message)

    def _fetch(self, ref: Ref, slot: int, part: ArenaPart = ArenaPart.RESULT) -> None:
        image_of(self._arena, part, slot)[:] = self._node.get(ref)

    def _apart(self, results: list[_Result]) -> None:
        """Have each worker take its own result after all. Does not block."""
        threading.Thread(target=self._alone, args=(results,), daemon=True).start()

    def _alone(self, results: list[_Result]) -> None:
        for worker, message, slot, ref in results:
            try:
                image: Image = self._node.get(ref)
            except (RayError, UserError):
                worker.kill()
            else:
                worker.take(message, slot, image)


def _where(worker: RayWorkerHandle, order: ShardOrder) -> StepOnNode:
    return StepOnNode(worker.place, order.job, order.step)


T = TypeVar("T")

PATIENCE = 0.5  # of the time that a result took, it waits for others


class StepOnNode(NamedTuple):
    """A step on a node."""

    place: str
    job: int
    step: int


@dataclass
class _Shards(Generic[T]):
    """The shards of a step on a node, from their orders until they are passed on."""

    of: int  # V
    # shard -> worker -> seconds, monotonic: several workers of a node may compute one shard.
    ordered_at: dict[int, dict[object, float]] = field(default_factory=dict)
    waiting: dict[int, T] = field(default_factory=dict)  # shard -> the first result of it


class NodeSums(Generic[T]):
    """Which results wait for each other.

    Args:
        clock: for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._steps: dict[StepOnNode, _Shards[T]] = {}

    def ordered(self, where: StepOnNode, shard: int, shards: int, worker: object) -> None:
        """Note that a worker there computes a shard of so many."""
        with self._changed:
            step = self._steps.setdefault(where, _Shards(shards))
            step.ordered_at.setdefault(shard, {}).setdefault(worker, self._clock())

    def lost(self, where: StepOnNode, shard: int, worker: object) -> None:
        """Note that a worker there will not have computed a shard.

        Results wait for the shard as long as another worker there computes it. A result of the
        shard that another worker has handed in already goes on waiting for the others.
        """
        with self._changed:
            step = self._steps.get(where)
            if step is None or step.ordered_at.get(shard, {}).pop(worker, None) is None:
                return
            if not step.ordered_at[shard] and shard not in step.waiting:
                self._drop(where, [shard])

    def done(self, where: StepOnNode, shard: int, result: T, worker: object) -> dict[int, T]:
        """Return results that can be added, by their shards in order: this one, or more.

        It waits for the others. Empty: the one that was last has it, too.
        """
        with self._changed:
            step = self._steps.get(where)
            ordered_at = None if step is None else step.ordered_at.get(shard, {}).get(worker)
            if step is None or ordered_at is None or shard in step.waiting:
                return {shard: result}  # two workers of the node have computed it
            step.waiting[shard] = result
            took_s = self._clock() - ordered_at
            until = self._clock() + min(PATIENCE * took_s, NODE_SUM_S)
            while step.waiting.get(shard) is result:
                group = together(shard, step.ordered_at, step.of)
                if not step.waiting.keys() >= set(group):
                    if (left_s := until - self._clock()) > 0:
                        self._changed.wait(left_s)
                        continue
                    group = together(shard, step.waiting, step.of)
                found = {each: step.waiting[each] for each in group}
                self._drop(where, group)
                return found
            return {}

    def _drop(self, where: StepOnNode, shards: Iterable[int]) -> None:
        if (step := self._steps.get(where)) is None:
            return
        for shard in shards:
            step.ordered_at.pop(shard, None)
            step.waiting.pop(shard, None)
        if not step.ordered_at:
            del self._steps[where]
        self._changed.notify_all()
