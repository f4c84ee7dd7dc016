"""The shard runner: computes the shards of a worker, for every engine.

A run of shards ends in three ways: with a result for each shard, cancelled between two phases, or
with an exception raised in a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from quorate.coordination.tree import TreeSum
from quorate.data.feed import Feed
from quorate.engines.job import Job, NotWanted, Task
from quorate.engines.model_changes import ModelChangesReceiver
from quorate.engines.remote_error import exited
from quorate.engines.stages.pipelined_replica import PipelinedReplica
from quorate.engines.worker_status import Timesheet
from quorate.machine.signal_handlers import LeftError
from quorate.replica.flat import Flat
from quorate.replica.replica import Replica
from quorate.replica.shard_sum import ShardSum
from quorate.replica.snapshots import Snapshot
from quorate.replica.streams import Stream


class ShardFailure(NamedTuple):
    """An exception, raised while a shard was computed."""

    shard: int
    error: BaseException


# The end of a run of shards: results or sums of results in the order of shards, or a failure; None:
# cancelled.
Outcome = list[ShardSum] | ShardFailure | None


def never(error: BaseException) -> bool:  # noqa: ARG001
    """Return False: no exception leaves the worker."""
    return False


class ShardRunner:
    """Computes shards with the replica of one worker.

    Args:
        number: of the worker.
        sheet: the worker's timesheet.
        frozen: returns the coordinator's values of the frozen parameters, by name.
        raises: whether an exception is raised instead of returned.

    Attributes:
        changes: repeats user code's changes of the coordinator's model.
    """

    def __init__(
        self,
        number: int,
        replica: Replica,
        sheet: Timesheet,
        frozen: Callable[[], Mapping[str, torch.Tensor]] = dict,
        *,
        raises: Callable[[BaseException], bool] = never,
    ) -> None:
        self.number, self.replica, self.sheet, self._raises = number, replica, sheet, raises
        self.changes = ModelChangesReceiver(replica, frozen)

    def run(
        self,
        job: Job,
        feed: Callable[[], Feed],
        stream: Stream,
        step: int,
        first: int,
        into: Sequence[Flat | None],
        *,
        is_cancelled: Callable[[], bool] | None = None,
        beside: Sequence[Any] | None = None,
        snapshot: Snapshot | None = None,
        is_only: bool = False,
    ) -> Outcome:
        """Compute shards of one step, and return their results. Blocks.

        Args:
            feed: returns the rows of the job; called when the first phase has begun.
            first: the first of the shards.
            into: for each shard a vector to write the gradient to, or None.
            is_cancelled: asked at the start of each phase. Default: nothing cancels the shards.
            beside: for each shard its further inputs; see ``Job.beside``.
            snapshot: of the parameters; see ``Task``.
            is_only: see ``Task``.

        Returns:
            The results in the order of shards, perhaps sums over subtrees; None if the shards were
            cancelled.
        """
        at_shard = first
        self.sheet.record(job.name if step in job.traced else None, step, first)

        def enter(shard: int, phase: str) -> None:
            nonlocal at_shard
            at_shard = shard
            if is_cancelled is not None and is_cancelled():
                raise NotWanted
            self.sheet.tell(phase, step, shard)

        tasks = [
            Task(
                *(self.number, step, shard, vector, partial(enter, shard)),
                None if beside is None else beside[shard - first],
                self.sheet.waits_for,
                snapshot,
                is_only,
            )
            for shard, vector in enumerate(into, start=first)
        ]
        try:
            enter(first, "fetching")
            try:
                results = job.compute_run(self.replica, stream, feed(), tasks)
            except SystemExit as error:
                if isinstance(error, LeftError):
                    raise
                # Of user code, which must not end the program from within a shard.
                where = f"worker {self.number}, {job.place(step, at_shard)}"
                raise exited(error, where) from error
            for shard, result in enumerate(results, start=first):
                result.computed_by(self.number, shard)
            if not isinstance(self.replica, PipelinedReplica) or results[0].gradient is None:
                return results
            # Stages have added the gradients of each subtree. A shard has no gradient either if
            # terms of its loss await their totals.
            is_added = any(r.gradient is None and not r.awaits_totals for r in results)
            return join_results(results, job.plan.shards_of(step)) if is_added else results
        except NotWanted:
            return None
        except BaseException as error:  # the edge of the worker: the coordinator decides
            if self._raises(error):
                raise
            job.annotate(error, tasks[at_shard - first], self.replica.device)
            return ShardFailure(at_shard, error)


def join_results(results: Sequence[ShardSum], shards: int) -> list[ShardSum]:
    """Join consecutive results of a step of some shards: the gradients are added already."""
    tree: TreeSum[ShardSum] = TreeSum(shards, ShardSum.join)
    for result in results:
        tree.put((0, result.shares[0].shard), result)
    return [*tree.parts.values()]
