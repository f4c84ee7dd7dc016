"""A step once more: its gradient at parameters that the optimizer has moved to, by all workers.

It is computed of the same rows, with the same random numbers, and its sum is that of the same tree:
so a run with such an optimizer, too, has the same bits on any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from quorate.coordination import rules
from quorate.coordination.coordinator import Coordinator
from quorate.coordination.tree import tree_sum
from quorate.data.source import Source
from quorate.engines import Transport
from quorate.engines.job import TrainingAgain
from quorate.errors import SettingError
from quorate.replica.flat import Flat
from quorate.replica.shard_sum import ShardSum
from quorate.services.display.raised_shards import RaisedShards
from quorate.training.drive import Ready, drive
from quorate.training.optimizing.by_phase import PhaseOptimizers
from quorate.training.optimizing.closure import needs_closure
from quorate.training.optimizing.optimizer import FlatOptimizer


class StepAgain:
    """Has the workers of a training loop compute a step once more.

    Args:
        transport: of the loop.
        source: of the loop.
        parameters: that workers compute from.
        threads: intra-op threads of a worker.
        timeout_s: how long a worker may be silent; None: for ever.
        say: shows a line to the user: who raised in a shard that another one computes now.
    """

    def __init__(
        self,
        transport: Transport,
        source: Source,
        parameters: Flat,
        *,
        threads: int,
        timeout_s: float | None,
        say: Callable[[str], None],
    ) -> None:
        self._transport = transport
        self._source = source
        self._parameters = parameters
        self._threads = threads
        self._timeout_s = timeout_s
        self._say = say
        self._raised = RaisedShards()  # each worker is named once

    def __call__(self, step: int, take: Callable[[ShardSum], None]) -> None:
        """Hand the step's sum to ``take``. Blocks until workers have computed it.

        Raises:
            Whatever user code raised in a shard that failed beyond repair.
        """
        plan = self._source.plan
        steps = range(step, step + 1)
        # A job of its own: workers take parameters anew for each.
        job = TrainingAgain(self._source, self._parameters, steps, threads=self._threads)

        def add(ready: Ready) -> None:
            take(tree_sum(ready.parts, plan.shards_of(step), ShardSum.add))

        with closing(self._transport.open(job)) as channel:
            coordinator = Coordinator(
                shards_of=plan.shards_of,
                first_step=steps.start,
                last_step=steps.stop,
                rule=WithoutCopies(),
                timeout_s=self._timeout_s,
            )
            for _ in drive(coordinator, channel, add, say=self._say, raised_shards=self._raised):
                pass


class WithoutCopies(rules.Sync):
    """No worker computes a shard any more when the last one is in: their results are not waited for
    when the job ends, and would come into memory that the next one lends.
    """

    copies = False


def step_again(
    transport: Transport,
    source: Source,
    optimizer: FlatOptimizer | PhaseOptimizers,
    rule: rules.Rule,
    *,
    threads: int,
    timeout_s: float | None,
    say: Callable[[str], None],
) -> StepAgain | None:
    """Return how a loop's optimizer gets gradients again; None if it takes no closure.

    Raises:
        SettingError: it needs one, under a rule by which workers go on while it steps.
    """
    if isinstance(optimizer, PhaseOptimizers) or not optimizer.takes_closure:
        return None
    if isinstance(rule, rules.Sync):
        parameters = optimizer.flat_parameters
        return StepAgain(
            transport, source, parameters, threads=threads, timeout_s=timeout_s, say=say
        )
    if needs_closure(optimizer.inner):
        raise SettingError(
            "update",
            rule.name,
            f"sync, as {type(optimizer.inner).__name__} asks for a step's gradient again",
            "pass update='sync', or take an optimizer that steps from one gradient",
        )
    return None
