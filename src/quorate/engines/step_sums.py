"""Step sums: the results of a job's shards, added along the tree of each step.

    put        a worker has computed shards; the coordinator has not decided about the shards yet
    decide     the coordinator keeps or discards shards
    add_next   a thread with time adds a kept result to the sum of its step
    take       the update gets the sums of its step, and kept results not added yet
    recycle    the memory of a result or sum is free again: after the update, or after a discard

Legend: V shards of a step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from quorate.coordination.plan import Plan
from quorate.coordination.protocol import Discard, Keep
from quorate.coordination.tree import Node, TreeSum, leaves
from quorate.replica.shard_sum import Part, ShardSum


@dataclass(slots=True)
class _Result:
    """The result of a shard, or of all shards below a node, until the coordinator's decisions."""

    node: Node
    sum: ShardSum
    undecided: int  # shards
    is_kept: bool = False  # whether the coordinator keeps one of the shards


class StepSums:
    """Results of one worker for one job, or of several workers with common memory.

    Threads besides the coordinator's call ``add_next`` and ``add_kept`` alone.

    Args:
        plan: of the job.
        recycle: takes back the memory of a result or sum.
    """

    def __init__(self, plan: Plan, recycle: Callable[[ShardSum], None]) -> None:
        self.recycle = recycle
        self._plan = plan
        self._undecided: dict[tuple[int, int, int], _Result] = {}  # by worker, step and shard
        self._kept: deque[tuple[int, Node, ShardSum]] = deque()  # with the step; not added yet
        self._sums: dict[int, TreeSum[ShardSum]] = {}  # by step
        self._adding = threading.Lock()
        self._error: Exception | None = None  # from an addition by another thread

    def put(self, step: int, result: ShardSum) -> None:
        """Take the result of a shard, or of all shards below a node of the tree."""
        shares = result.shares
        level = (len(shares) - 1).bit_length()
        undecided = _Result((level, shares[0].shard >> level), result, len(shares))
        for shard, worker, _, _ in shares:
            self._undecided[worker, step, shard] = undecided

    def result(self, worker: int, step: int, shard: int) -> ShardSum:
        """Return a result that awaits the coordinator's decision."""
        return self._undecided[worker, step, shard].sum

    def decide(self, effect: Keep | Discard) -> None:
        """Keep or discard results.

        A sum of shards counts from the first kept shard on. Copies of the sum's other shards have
        the same bits, but a sum cannot lose a shard. So the copies are recycled.
        """
        worker, step, keeps = effect.worker, effect.step, isinstance(effect, Keep)
        for shard in range(effect.shard, effect.shard + effect.count):
            result = self._undecided.pop((worker, step, shard))
            result.undecided -= 1
            if result.is_kept:
                continue
            if keeps:
                result.is_kept = True
                if result.node[0] > 0:
                    self._recycle_copies(step, result.node)
                self._kept.append((step, result.node, result.sum))
            elif not result.undecided:
                self.recycle(result.sum)

    def _recycle_copies(self, step: int, node: Node) -> None:
        """Recycle kept results of shards below a node.

        None of the results is in a sum with shards beyond the node, because a shard below the node
        is missing.
        """
        self.add_kept()
        parts, shards = self._sum_of(step).parts, self._plan.shards_of(step)
        for part in [part for part in parts if leaves(part, shards)[0] in leaves(node, shards)]:
            self.recycle(parts.pop(part))

    @property
    def has_kept(self) -> bool:
        """True if kept results wait for ``add_next``."""
        return bool(self._kept)

    def add_next(self) -> bool:
        """Add one kept result to the sum of its step; return False if there is none."""
        with self._adding:
            if not self._kept:
                return False
            step, node, result = self._kept.popleft()
            sums = self._sums.get(step) or self._sum_of(step)
            sums.put(node, result)
            return True

    def add_kept(self) -> None:
        """Add all kept results. An error is raised by ``take``, in the coordinator's thread."""
        try:
            while self._kept and self.add_next():
                pass
        except Exception as error:  # the edge of the thread
            self._error = error

    def take(self, step: int) -> list[Part]:
        """Return the sums of a step, with kept results not added yet, and forget the step.

        Blocks while another thread adds a result.

        Raises:
            Whatever was raised by an addition in another thread.
        """
        with self._adding:
            if self._error is not None:
                raise self._error
            parts = [*self._sums.pop(step).parts.items()] if step in self._sums else []
            if self._kept:
                parts += [(node, result) for of, node, result in self._kept if of == step]
                self._kept = deque(each for each in self._kept if each[0] != step)
            return parts

    def _sum_of(self, step: int) -> TreeSum[ShardSum]:
        if step not in self._sums:
            self._sums[step] = TreeSum(self._plan.shards_of(step), self._add)
        return self._sums[step]

    def _add(self, left: ShardSum, right: ShardSum) -> ShardSum:
        left.add(right)
        self.recycle(right)
        return left
