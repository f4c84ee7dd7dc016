"""Step sums: what one worker of this process holds for one job."""

from __future__ import annotations

import threading
from collections import deque

from quorate.coordination.plan import Plan
from quorate.coordination.protocol import Discard, Keep
from quorate.coordination.tree import TreeSum
from quorate.replica.replica import Replica
from quorate.replica.shard_sum import Part, ShardSum


class StepSums:
    """Results of shards that are not decided on, and for each step the sum of those kept.

    The worker adds what was decided on when it is free; the thread that collects adds the rest.
    """

    def __init__(self, plan: Plan, replica: Replica) -> None:
        self._plan, self._replica = plan, replica
        self._sums: dict[int, TreeSum[ShardSum]] = {}  # by step
        self._adding = threading.Lock()
        self._kept: deque[tuple[int, int]] = deque()  # step and shard, to be added
        self.pending: dict[tuple[int, int], ShardSum] = {}  # by step and shard

    def keep(self, effect: Keep) -> None:
        """Note results that ``add_kept`` is to add. Any thread may call it."""
        step, first = effect.step, effect.shard
        self._kept.extend([(step, shard) for shard in range(first, first + effect.count)])

    def add_kept(self) -> None:
        """Add the results that were kept."""
        with self._adding:
            while self._kept:
                step, shard = self._kept.popleft()
                total = self._sums.get(step)
                if total is None:
                    total = TreeSum(self._plan.shards_of(step), self._replica.add)
                    self._sums[step] = total
                total.put((0, shard), self.pending.pop((step, shard)))

    def discard(self, effect: Discard) -> None:
        """Take back the memory of results that do not count."""
        for shard in range(effect.shard, effect.shard + effect.count):
            self._replica.recycle(self.pending.pop((effect.step, shard)))

    def take(self, step: int) -> list[Part]:
        """Return the sums of a step, and hold them no longer."""
        return list(self._sums.pop(step).parts.items())
