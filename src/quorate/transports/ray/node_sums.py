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

from quorate.coordination.host_sums import together

T = TypeVar("T")

PATIENCE = 0.5  # of the time that a result took, it waits for others
MOST_S = 1.0  # and no longer


class Where(NamedTuple):
    """A step on a node."""

    place: str
    job: int
    step: int


@dataclass
class _Shards(Generic[T]):
    """The shards of a step on a node, from their orders until they are passed on."""

    of: int  # V
    ordered_at: dict[int, float] = field(default_factory=dict)  # shard -> seconds, monotonic
    waiting: dict[int, T] = field(default_factory=dict)  # shard -> its result

    def drop(self, shard: int) -> None:
        self.ordered_at.pop(shard, None)
        self.waiting.pop(shard, None)


class NodeSums(Generic[T]):
    """Which results wait for each other.

    Args:
        clock: for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._steps: dict[Where, _Shards[T]] = {}

    def ordered(self, where: Where, shard: int, shards: int) -> None:
        """Note that a worker there computes a shard of so many."""
        with self._changed:
            step = self._steps.setdefault(where, _Shards(shards))
            step.ordered_at.setdefault(shard, self._clock())

    def lost(self, where: Where, shard: int) -> None:
        """Note that a worker there will not have computed a shard: nobody waits for it."""
        with self._changed:
            self._drop(where, [shard])

    def done(self, where: Where, shard: int, result: T) -> dict[int, T]:
        """Return results that can be added, by their shards in order: this one, or more.

        It waits for the others. Empty: the one that was last has it, too.
        """
        with self._changed:
            step = self._steps.get(where)
            if step is None or shard not in step.ordered_at or shard in step.waiting:
                return {shard: result}  # two workers of the node have computed it
            step.waiting[shard] = result
            took_s = self._clock() - step.ordered_at[shard]
            until = self._clock() + min(PATIENCE * took_s, MOST_S)
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
            step.drop(shard)
        if not step.ordered_at:
            del self._steps[where]
        self._changed.notify_all()
