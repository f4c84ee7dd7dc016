"""The shard runner: computes the shards that a worker was given, whichever engine gave them.

A run of shards ends in one of three ways: with a result for each shard, cancelled between two
phases, or with what was raised in one of the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from quorate.data.feed import Feed
from quorate.engines.job import Job, NotWanted, Task
from quorate.engines.worker_status import Timesheet
from quorate.replica.flat import Flat
from quorate.replica.replica import Replica
from quorate.replica.shard_sum import ShardSum
from quorate.replica.streams import Stream


class ShardFailure(NamedTuple):
    """An exception, raised while a shard was computed."""

    shard: int
    error: BaseException


# The end of a run of shards: results in the order of shards, or a failure; None: cancelled.
Outcome = list[ShardSum] | ShardFailure | None


def never(error: BaseException) -> bool:  # noqa: ARG001
    """Return False: no exception leaves the worker."""
    return False


class ShardRunner:
    """Computes shards with the replica of one worker.

    Args:
        worker: number of the worker.
        sheet: the worker's timesheet.
        passes: whether an exception is raised instead of returned.
    """

    def __init__(
        self,
        worker: int,
        replica: Replica,
        sheet: Timesheet,
        *,
        passes: Callable[[BaseException], bool] = never,
    ) -> None:
        self._worker, self._replica, self._sheet, self._passes = worker, replica, sheet, passes

    def run(
        self,
        job: Job,
        feed: Callable[[], Feed],
        stream: Stream,
        step: int,
        first: int,
        into: Sequence[Flat | None],
        *,
        is_cancelled: Callable[[], bool],
        beside: Sequence[Any] | None = None,
        **options: Any,
    ) -> Outcome:
        """Compute shards of one step, and return their results. Blocks.

        Args:
            feed: returns the rows of the job; called when the first phase has begun.
            first: the first of the shards.
            into: for each shard a vector to write the gradient to, or None.
            is_cancelled: asked at the start of each phase.
            beside: for each shard its further inputs; see ``Job.beside``.
            options: further fields of each ``Task``.

        Returns:
            The results in the order of shards; None if the shards were cancelled.
        """
        at_shard = first
        self._sheet.record(job.name if step in job.traced else None, step, first)

        def enter(shard: int, phase: str) -> None:
            nonlocal at_shard
            at_shard = shard
            if is_cancelled():
                raise NotWanted
            self._sheet.tell(phase, *job.ticket(step, shard))

        tasks = [
            Task(
                *(self._worker, step, shard, vector, partial(enter, shard)),
                beside=None if beside is None else beside[shard - first],
                waits_for=self._sheet.waits_for,
                **options,
            )
            for shard, vector in enumerate(into, start=first)
        ]
        try:
            enter(first, "fetching")
            results = job.compute_run(self._replica, stream, feed(), tasks)
            return [r.computed_by(self._worker, first + n) for n, r in enumerate(results)]
        except NotWanted:
            return None
        except BaseException as error:  # the edge of the worker: the coordinator decides
            if self._passes(error):
                raise
            job.annotate(error, tasks[at_shard - first], self._replica.device)
            return ShardFailure(at_shard, error)
