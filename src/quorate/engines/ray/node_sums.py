"""Sums on a node: results of its workers for one step, added where their shards make up a subtree.

A result waits for further results of its step as long as half of its computation took. The sum has
the bits of any sum along the tree of shards, and leaves the node once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from quorate.coordination.ownership import together
from quorate.coordination.tree import tree_sum
from quorate.engines.processes.arena import Arena
from quorate.engines.processes.worker_messages import ComputeShards, ShardsDone
from quorate.machine.limits import NODE_SUM_S
from quorate.replica.shard_sum import ShardSum

if TYPE_CHECKING:
    from quorate.engines.ray.relayed_worker import RelayedWorker

PATIENCE = 0.5  # the wait of a result for siblings, relative to the time of its computation


class WorkerResult(NamedTuple):
    """The result of a shard, in a slot of the node's arena."""

    worker: RelayedWorker
    order: ComputeShards
    answer: ShardsDone
    slot: int


@dataclass
class _Step:
    """The shards of a step on this node, from their orders until they are passed on."""

    # shard -> worker -> seconds, monotonic: several workers of a node may compute one shard.
    ordered_at: dict[int, dict[RelayedWorker, float]] = field(default_factory=dict)
    waiting: dict[int, WorkerResult] = field(default_factory=dict)  # shard -> the first result
    until: dict[int, float] = field(default_factory=dict)  # shard -> the end of its wait


class NodeSums:
    """The results of the workers of a node that wait for each other."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int], _Step] = {}  # by job and step

    def ordered(self, worker: RelayedWorker, order: ComputeShards) -> None:
        """Note that a worker computes a shard."""
        if order.leaves > 1:
            step = self._steps.setdefault((order.job, order.step), _Step())
            step.ordered_at.setdefault(order.shard, {}).setdefault(worker, time.monotonic())

    def lost(self, worker: RelayedWorker, order: ComputeShards) -> None:
        """Note that a worker will not have computed a shard.

        A result of the same shard by a second worker goes on waiting for siblings.
        """
        step = self._steps.get((order.job, order.step))
        if step is None or step.ordered_at.get(order.shard, {}).pop(worker, None) is None:
            return
        if not step.ordered_at[order.shard] and order.shard not in step.waiting:
            self._drop((order.job, order.step), [order.shard])

    def done(self, result: WorkerResult) -> bool:
        """Have a result wait for siblings; return False if there are none to wait for."""
        order, now = result.order, time.monotonic()
        step = self._steps.get((order.job, order.step), _Step())
        ordered_at = step.ordered_at.get(order.shard, {}).get(result.worker)
        if ordered_at is None or order.shard in step.waiting:  # alone, or a copy that came second
            return False
        step.waiting[order.shard] = result
        step.until[order.shard] = now + min(PATIENCE * (now - ordered_at), NODE_SUM_S)
        return True

    def hurry(self, worker: RelayedWorker) -> None:
        """Have results of a worker wait for siblings no more."""
        for step in self._steps.values():
            for shard, result in step.waiting.items():
                if result.worker is worker:
                    step.until[shard] = 0.0

    def ready(self) -> Iterable[list[WorkerResult]]:
        """Yield groups of results to add now: a subtree each, in the order of shards."""
        now = time.monotonic()
        for key, step in list(self._steps.items()):
            for shard in sorted(step.waiting):
                if shard not in step.waiting:  # in a group by now
                    continue
                shards = step.waiting[shard].order.leaves
                group = together(shard, step.ordered_at, shards)
                if not step.waiting.keys() >= set(group):
                    if now < step.until[shard]:
                        continue
                    group = together(shard, step.waiting, shards)
                results = [step.waiting[each] for each in group]
                self._drop(key, group)
                yield results

    def due(self) -> float:
        """Return when a result has waited long enough; infinity: no result waits."""
        times = (until for step in self._steps.values() for until in step.until.values())
        return min(times, default=float("inf"))

    def _drop(self, key: tuple[int, int], shards: Iterable[int]) -> None:
        step = self._steps[key]
        for shard in shards:
            for shards_of in (step.ordered_at, step.waiting, step.until):
                shards_of.pop(shard, None)
        if not step.ordered_at:
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
