"""An evaluation: the sum over all rows of a dataset, each once, by the same workers as training."""

from __future__ import annotations

from contextlib import ExitStack, closing

from quorate.coordination import rules
from quorate.coordination.coordinator import Coordinator
from quorate.coordination.protocol import Stop
from quorate.coordination.tree import TreeSum, tree_sum
from quorate.data.source import Source
from quorate.errors import LossError
from quorate.replica.flat import Flat
from quorate.replica.shard_sum import ShardSum
from quorate.training.drive import Ready, drive
from quorate.training.stop import Stops
from quorate.transports import Transport
from quorate.transports.job import Evaluation


def evaluate(
    source: Source,
    parameters: Flat,
    transport: Transport,
    stops: Stops,
    *,
    loader_workers: int,
    threads: int,
    timeout_s: float,
) -> ShardSum | None:
    """The sum over every step of the source's plan, in order; None if it was stopped.

    Raises:
        LossError: its weight is zero.
    """
    plan = source.plan
    job = Evaluation(
        source,
        parameters,
        range(plan.steps_per_epoch),
        loader_workers=loader_workers,
        threads=threads,
    )
    total = TreeSum(plan.steps_per_epoch, ShardSum.add)

    def add(ready: Ready) -> None:
        step_sum = tree_sum(ready.parts, plan.shards_of(ready.step), ShardSum.add)
        total.put((0, ready.step), step_sum)

    with ExitStack() as stack:
        channel = stack.enter_context(closing(transport.open(job)))
        stack.enter_context(stops.telling(lambda reason: channel.post(Stop(reason))))
        coordinator = Coordinator(
            shards_of=plan.shards_of,
            first_step=0,
            last_step=plan.steps_per_epoch,
            rule=rules.Sync(),
            timeout_s=timeout_s if transport.can_replace else None,
        )
        for _ in drive(coordinator, channel, add):
            pass
    if coordinator.applied < plan.steps_per_epoch:
        return None
    assert total.root is not None
    if total.root.weight == 0:
        raise LossError("weight: it is 0 in all shards of the evaluation: nothing to average")
    return total.root
