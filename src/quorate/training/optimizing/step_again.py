"""A repeated step: workers compute the gradient at parameters moved by the optimizer.

The gradient is computed from the same rows with the same random numbers, and summed along the same
tree: so a run with such an optimizer, too, has the same bits on any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable

from quorate.coordination import rules
from quorate.coordination.tree import tree_sum
from quorate.data.source import Source
from quorate.engines import Transport
from quorate.engines.job import TrainingAgain
from quorate.errors import SettingError
from quorate.replica.shard_sum import ShardSum
from quorate.services.display.raised_shards import RaisedShards
from quorate.training.drive import Ready, run_job
from quorate.training.optimizing.closure import needs_closure
from quorate.training.optimizing.optimizer import FlatOptimizer

# Passes the sum of a step, computed again, to a function. Blocks until workers have computed it.
StepAgain = Callable[[int, Callable[[ShardSum], None]], None]


class WithoutCopies(rules.Sync):
    """A rule without copies of shards, for jobs that end with their last shard.

    The job would not wait for the results of copies, and those would be written to memory lent to
    the next job.
    """

    copies = False


def step_again(
    transport: Transport,
    source: Source,
    optimizer: FlatOptimizer,
    rule: rules.Rule,
    *,
    threads: int,
    timeout_s: float | None,
    say: Callable[[str], None],
) -> StepAgain | None:
    """Return the function that computes a step again; None if the optimizer takes no closure.

    The function raises the error of user code in a shard that failed on all attempts.

    Args:
        transport: the transport of the loop.
        source: the source of the loop.
        threads: intra-op threads of a worker.
        timeout_s: how long a worker may be silent, in seconds; None: without a limit.
        say: shows a line to the user, such as the worker that raised in a shard now computed by
            another worker.

    Raises:
        SettingError: the optimizer needs a closure, but under the rule workers go on while it
            steps.
    """
    if not optimizer.takes_closure:
        return None
    if not isinstance(rule, rules.Sync):
        if needs_closure(optimizer.inner):
            raise SettingError(
                "update",
                rule.name,
                f"sync, as {type(optimizer.inner).__name__} asks for a step's gradient again",
                "pass update='sync', or take an optimizer that steps from one gradient",
            )
        return None
    parameters, plan = optimizer.flat_parameters, source.plan
    raised = RaisedShards()  # each worker is named once

    def again(step: int, take: Callable[[ShardSum], None]) -> None:
        def add(ready: Ready) -> None:
            take(tree_sum(ready.parts, plan.shards_of(step), ShardSum.add))

        # A separate job: workers read parameters anew for each job.
        job = TrainingAgain(source, parameters, range(step, step + 1), threads=threads)
        run_job(transport, job, add, WithoutCopies(), timeout_s, say=say, raised_shards=raised)

    return again
