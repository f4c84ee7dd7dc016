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
from quorate.engines.stages.shard_input import no_stage
from quorate.replica.flat import Flat
from quorate.replica.replica import Replica
from quorate.replica.shard_sum import ShardSum
from quorate.replica.streams import Stream


class ShardFailure(NamedTuple):
    """An exception, raised while a shard was computed."""

    shard: int
    error: BaseException


def never(error: BaseException) -> bool:  # noqa: ARG001
    """Return False: no exception leaves the worker."""
    return False


class ShardRunner:
    """Computes shards with the replica of one worker.

    Args:
        worker: number of the worker.
        tell: receives the phase, the step and the shard whenever a phase begins.
        passes: whether an exception is raised instead of returned.
    """

    def __init__(
        self,
        worker: int,
        replica: Replica,
        tell: Callable[[str, int, int], None],
        *,
        passes: Callable[[BaseException], bool] = never,
        waits_for: Callable[[int], None] = no_stage,
    ) -> None:
        self._worker, self._replica = worker, replica
        self._tell, self._passes, self._waits_for = tell, passes, waits_for

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
    ) -> list[ShardSum] | ShardFailure | None:
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

        def enter(shard: int, phase: str) -> None:
            nonlocal at_shard
            at_shard = shard
            if is_cancelled():
                raise NotWanted
            self._tell(phase, *job.ticket(step, shard))

        tasks = [
            Task(
                *(self._worker, step, shard, vector, partial(enter, shard)),
                beside=None if beside is None else beside[shard - first],
                waits_for=self._waits_for,
                **options,
            )
            for shard, vector in enumerate(into, start=first)
        ]
        try:
            enter(first, "fetching")
            return job.compute_run(self._replica, stream, feed(), tasks)
        except NotWanted:
            return None
        except BaseException as error:  # the edge of the worker: the coordinator decides
            if self._passes(error):
                raise
            job.annotate(error, tasks[at_shard - first], self._replica.device)
            return ShardFailure(at_shard, error)
