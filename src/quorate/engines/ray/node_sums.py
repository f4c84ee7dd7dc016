"""Sums of a node: results of a node's workers for one step are added before the results leave.

Results are added where their shards make up a subtree. A result waits for further results of its
step as long as half of its computation took. The sum has the bits of any sum along the tree of
shards, and leaves the node once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from quorate.coordination.ownership import together
from quorate.coordination.tree import tree_sum
from quorate.engines.processes import worker_messages as messages
from quorate.engines.processes.arena import Arena
from quorate.machine.limits import NODE_SUM_S
from quorate.replica.shard_sum import ShardSum

if TYPE_CHECKING:
    from quorate.engines.ray.relay_actor import RelayedWorker

PATIENCE = 0.5  # the wait of a result for siblings, relative to the time of its computation


class WorkerResult(NamedTuple):
    """The result of a shard, in a slot of the node's arena."""

    worker: RelayedWorker
    order: messages.ComputeShards
    answer: messages.ShardsDone
    slot: int
    computed_s: float  # since the order


class WaitingResult(NamedTuple):
    """A result that waits for siblings."""

    result: WorkerResult
    until: float  # monotonic


class NodeSums:
    """The results of the workers of a node that wait for each other.

    Args:
        orders: returns the orders that the workers of the node have, and have not answered.
    """

    def __init__(self, orders: Callable[[], Iterable[messages.ComputeShards]]) -> None:
        self._orders = orders
        self._steps: dict[tuple[int, int], dict[int, WaitingResult]] = {}  # by job and step

    def put(self, result: WorkerResult) -> bool:
        """Have a result wait for siblings; return False if the result is to go alone.

        A result goes alone if no sum is allowed, or if a result of the same shard waits.
        """
        order = result.order
        step = self._steps.setdefault((order.job, order.step), {})
        if order.leaves == 1 or order.shard in step:
            return False
        wait_s = min(PATIENCE * result.computed_s, NODE_SUM_S)
        step[order.shard] = WaitingResult(result, time.monotonic() + wait_s)
        return True

    def hurry(self, worker: RelayedWorker) -> None:
        """Have results of a worker wait for siblings no more."""
        for step in self._steps.values():
            for shard, waiting in step.items():
                if waiting.result.worker is worker:
                    step[shard] = waiting._replace(until=0.0)

    def ready(self) -> Iterator[list[WorkerResult]]:
        """Yield groups of results to add now: a subtree each, in the order of shards."""
        now = time.monotonic()
        for key, step in list(self._steps.items()):
            orders = [order for order in self._orders() if (order.job, order.step) == key]
            for shard in sorted(step):
                if shard not in step:  # in a group by now
                    continue
                leaves = step[shard].result.order.leaves
                expected = step.keys() | {order.shard for order in orders if order.leaves > 1}
                group = together(shard, expected, leaves)
                if not step.keys() >= set(group):
                    if now < step[shard].until:
                        continue
                    group = together(shard, step, leaves)
                for order in orders:
                    if order.shard in group:  # a copy of a passed-on shard: nobody waits for it
                        order.leaves = 1
                yield [step.pop(each).result for each in group]
            if not step:
                del self._steps[key]

    def due(self) -> float:
        """Return when a result has waited long enough; infinity: no result waits."""
        waiting = (each for step in self._steps.values() for each in step.values())
        return min((each.until for each in waiting), default=inf)


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
