"""Sums per node: results of workers of one node are added there, and fetched as one.

A step has shards that are under way on a node. Those of them that make up a subtree of the tree of
shards, as large as can be, can be added before they travel: the sum is the same whoever makes it,
and fewer bytes reach the coordinator. So a result waits on its node for the others of its subtree.
It waits for half as long as it took itself, so that a straggler makes no others late.

No torch and no Ray is in here. Threads meet here: one that listens to each worker, and the
coordinator's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from quorate.coordination.ownership import together
from quorate.machine.limits import NODE_SUM_S

T = TypeVar("T")

PATIENCE = 0.5  # of the time that a result took, it waits for others


class Where(NamedTuple):
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
        self._steps: dict[Where, _Shards[T]] = {}

    def ordered(self, where: Where, shard: int, shards: int, worker: object) -> None:
        """Note that a worker there computes a shard of so many."""
        with self._changed:
            step = self._steps.setdefault(where, _Shards(shards))
            step.ordered_at.setdefault(shard, {}).setdefault(worker, self._clock())

    def lost(self, where: Where, shard: int, worker: object) -> None:
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

    def done(self, where: Where, shard: int, result: T, worker: object) -> dict[int, T]:
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

    def _drop(self, where: Where, shards: Iterable[int]) -> None:
        if (step := self._steps.get(where)) is None:
            return
        for shard in shards:
            step.ordered_at.pop(shard, None)
            step.waiting.pop(shard, None)
        if not step.ordered_at:
            del self._steps[where]
        self._changed.notify_all()
