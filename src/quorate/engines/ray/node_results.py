"""Results of workers on all nodes: how the results come into the coordinator's memory.

A result is an object on its worker's node until the coordinator fetches the object, or a sum with
further results of that node. A thread that listens to a worker copies into the slot of that worker
alone: the slot is lent until the thread has ended. Objects fetched by a different thread are copied
by the coordinator's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ray.exceptions import RayError

from quorate.coordination.ownership import together
from quorate.engines.processes.arena import Arena, Image
from quorate.engines.processes.worker_messages import NodeSum, ShardsDone
from quorate.engines.ray.images import ArenaPart, Ref, image_of
from quorate.engines.ray.own_node import OwnNode
from quorate.engines.ray.shard_orders import ShardOrder
from quorate.errors import UserError
from quorate.machine.limits import NODE_SUM_S

if TYPE_CHECKING:
    from quorate.engines.ray.worker_handle import RayWorkerHandle

PATIENCE = 0.5  # the wait of a result for siblings, relative to the time of its computation


class _Result(NamedTuple):
    worker: RayWorkerHandle
    message: ShardsDone
    slot: int
    ref: Ref


@dataclass
class _StepOnNode:
    """The shards of a step on a node, from their orders until they are passed on."""

    # shard -> worker -> seconds, monotonic: several workers of a node may compute one shard.
    ordered_at: dict[int, dict[RayWorkerHandle, float]] = field(default_factory=dict)
    waiting: dict[int, _Result] = field(default_factory=dict)  # shard -> the first result


class NodeResults:
    """The results of all workers.

    Args:
        arena: the coordinator's.
        node: the coordinator's own.
    """

    def __init__(self, arena: Arena, node: OwnNode) -> None:
        self._arena = arena
        self._node = node
        self._changed = threading.Condition()
        self._steps: dict[tuple[str, int, int], _StepOnNode] = {}  # by place, job and step

    def ordered(self, worker: RayWorkerHandle, order: ShardOrder) -> None:
        """Note that a worker computes a shard."""
        if order.shards > 1:
            with self._changed:
                step = self._steps.setdefault(_where(worker, order), _StepOnNode())
                step.ordered_at.setdefault(order.shard, {}).setdefault(worker, time.monotonic())

    def lost(self, worker: RayWorkerHandle, order: ShardOrder) -> None:
        """Note that a worker will not have computed a shard.

        Siblings wait for the shard as long as a second worker of the node computes the shard. If a
        second worker has handed in a result of the shard, that result goes on waiting for siblings.
        """
        with self._changed:
            step = self._steps.get(_where(worker, order))
            if step is None or step.ordered_at.get(order.shard, {}).pop(worker, None) is None:
                return
            if not step.ordered_at[order.shard] and order.shard not in step.waiting:
                self._drop(_where(worker, order), [order.shard])

    def done(
        self, worker: RayWorkerHandle, order: ShardOrder, message: ShardsDone, ref: Ref
    ) -> None:
        """Have the worker take its answer when the result is here. Called by who listens to it.

        If siblings are added to the result, the worker takes their answers too. If the result is
        added to a sibling, the sibling's worker takes the answer.
        """
        assert order.slot is not None
        own = _Result(worker, message, order.slot, ref)
        group = self._group(order, own)
        if len(group) > 1:
            try:
                refs = {shard: result.ref for shard, result in group.items()}
                self._fetch(worker.add(refs, order.shards), own.slot)
            except RayError:  # one of the actors is gone: the results of the rest are there
                self._alone([result for result in group.values() if result is not own])
            else:
                answers = [(each.worker.number, each.message) for each in group.values()]
                worker.take(NodeSum(answers, list(group.values())))
                return
        if group:
            part = ArenaPart.REST if message.is_held else ArenaPart.RESULT
            self._fetch(ref, own.slot, part)
            worker.take(message)

    def _group(self, order: ShardOrder, own: _Result) -> dict[int, _Result]:
        """Return results to be added, by their shards in order: one, or more with siblings.

        Blocks for as long as the result waits for siblings. Empty: a sibling has the result.
        """
        shard, where = order.shard, _where(own.worker, order)
        with self._changed:
            step = self._steps.get(where)
            ordered_at = None if step is None else step.ordered_at.get(shard, {}).get(own.worker)
            if step is None or ordered_at is None or shard in step.waiting:
                return {shard: own}  # alone in its step, or a copy that came second
            step.waiting[shard] = own
            now = time.monotonic()
            until = now + min(PATIENCE * (now - ordered_at), NODE_SUM_S)
            while step.waiting.get(shard) is own:
                group = together(shard, step.ordered_at, order.shards)
                if not step.waiting.keys() >= set(group):
                    if (left_s := until - time.monotonic()) > 0:
                        self._changed.wait(left_s)
                        continue
                    group = together(shard, step.waiting, order.shards)
                found = {each: step.waiting[each] for each in group}
                self._drop(where, group)
                return found
            return {}

    def _drop(self, where: tuple[str, int, int], shards: Iterable[int]) -> None:
        if (step := self._steps.get(where)) is None:
            return
        for shard in shards:
            step.ordered_at.pop(shard, None)
            step.waiting.pop(shard, None)
        if not step.ordered_at:
            del self._steps[where]
        self._changed.notify_all()

    def _fetch(self, ref: Ref, slot: int, part: ArenaPart = ArenaPart.RESULT) -> None:
        image_of(self._arena, part, slot)[:] = self._node.get(ref)

    def separate(self, node_sum: NodeSum) -> None:
        """Have each worker take its own result after all. Does not block."""
        threading.Thread(target=self._alone, args=(node_sum.results,), daemon=True).start()

    def _alone(self, results: list[_Result]) -> None:
        for worker, message, slot, ref in results:
            try:
                image: Image = self._node.get(ref)
            except (RayError, UserError):
                worker.kill()
            else:
                worker.take(message, slot, image)


def _where(worker: RayWorkerHandle, order: ShardOrder) -> tuple[str, int, int]:
    return worker.place, order.job, order.step
