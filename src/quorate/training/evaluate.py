"""An evaluation: the sum over all rows of a dataset, each once, by the workers of training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing

from quorate.coordination import rules
from quorate.coordination.plan import Plan
from quorate.coordination.tree import TreeSum, tree_sum
from quorate.data.source import Source, length
from quorate.engines import Transport
from quorate.errors import LossError
from quorate.replica.flat import Flat
from quorate.replica.model import unchanged
from quorate.replica.shard_sum import ShardSum
from quorate.replica.totals import joined
from quorate.training.config import DatasetConfig
from quorate.training.drive import Ready, run_job
from quorate.training.predicting.evaluable import evaluable_state
from quorate.training.predicting.gathered import Gathered
from quorate.training.prepare import TrainingSetup
from quorate.training.stop import Stops
from quorate.training.whole_batch.whole_batch import kind_of_evaluation, made_whole
from quorate.training.worker_group import WorkerGroup


def evaluate(
    workers: WorkerGroup,
    setup: TrainingSetup,
    data: DatasetConfig,
    *,
    averaged: bool | None,
    transport: Transport | None,
    stops: Stops,
    say: Callable[[str], None],
    called: str,
) -> dict[str, float] | None:
    """Return the means of loss and metrics, and finished totals, over a dataset; None if stopped.

    Args:
        averaged: whether to use the averaged weights. None: use them if there are any.
        transport: transport of the current loop, if there is one. Its workers compute if they have
            the dataset.
        called: name of the evaluation in messages: "validation".

    Raises:
        UserError: the dataset is empty, its weight is zero, or there are no averaged weights.
    """
    config, dataset = workers.config, data.dataset
    rows = length(dataset)
    plan = Plan(
        rows=rows,
        batch_size=min(config.batch_size, rows),
        shards=setup.shards or workers.least_workers,
        seed=config.seed,
        shuffle=False,
    )
    source = Source(dataset, plan, data.loading.collate)
    gathered = Gathered(workers.replicas.totals.kept, plan)
    with ExitStack() as stack:
        evaluated = evaluable_state(workers, setup, source, averaged, say)
        state, parameters = stack.enter_context(evaluated)
        if transport is None or not transport.can_compute(dataset) or not workers.collates(data):
            stack.enter_context(unchanged(state.model))
            transport = stack.enter_context(closing(workers.evaluators(state)))
        whole = made_whole(workers, state, source, parameters)
        total = _sum(source, parameters, whole, transport, stops, workers, say, gathered, called)
    if total is None:
        return None
    finished = joined(gathered.finished(), workers.replicas.totals.finished(total.totals))
    means = total.means()
    if config.has_phases:
        del means["loss"]  # the sum over all phases has no meaning
    return joined(means, finished)


def _sum(
    source: Source,
    parameters: Flat,
    whole: Callable[[int, ShardSum], ShardSum],
    transport: Transport,
    stops: Stops,
    workers: WorkerGroup,
    say: Callable[[str], None],
    gathered: Gathered,
    called: str,
) -> ShardSum | None:
    """Return the sum over every step of the source's plan, in order; None if stopped.

    Args:
        whole: adds, to the sum of a step, the results computed from the batch as a whole.
        gathered: receives the collected outputs.

    Raises:
        LossError: the weight of the sum is zero.
    """
    plan = source.plan
    job = kind_of_evaluation(workers)(
        source,
        parameters,
        range(plan.steps_per_epoch),
        loader_workers=workers.config.loading.processes,
        threads=workers.config.workers.threads,
    )
    total = TreeSum(plan.steps_per_epoch, ShardSum.add)

    def add(ready: Ready) -> None:
        step_sum = tree_sum(ready.parts, plan.shards_of(ready.step), ShardSum.add)
        gathered.put(step_sum.outputs)
        step_sum.outputs = []
        total.put((0, ready.step), whole(ready.step, step_sum))

    done = run_job(
        *(transport, job, add, rules.Sync(), workers.timeout_s, stops),
        say=say,
        copied_shards=workers.stragglers.copied_shards,
        called=called,
        begun=stops.begin,
    )
    if done < plan.steps_per_epoch:
        return None
    assert total.root is not None
    if total.root.weight == 0:
        raise LossError(
            "weight",
            got=f"0 in all shards of {called}",
            expected="a positive weight in at least one shard",
        )
    return total.root
