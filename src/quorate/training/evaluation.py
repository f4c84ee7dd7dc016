"""One pass over a dataset: the sum over all rows for an evaluation, each row for a prediction.

Workers of the current loop compute, if they have the dataset; otherwise workers of this process.
An evaluation adds the shards of each step, as training does. In a prediction each step is one
shard, and workers compute shards in turn. The lead of a worker over another is bounded, and so is
the memory of waiting results: only the results themselves grow with the dataset, and results may be
written to files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from quorate.coordination import rules
from quorate.coordination.plan import PlanByShard
from quorate.coordination.tree import TreeSum, tree_sum
from quorate.data.source import Source, length
from quorate.engines import Transport
from quorate.engines.prediction import OWN, Function, PredictionJob, name_of, note_own
from quorate.errors import LossError, OutputError, SettingError, UserError
from quorate.replica.beside.asks import asks_for_at
from quorate.replica.deterministic import repeatable
from quorate.replica.flat import Flat
from quorate.replica.model import unchanged
from quorate.replica.outputs.rows import Piece
from quorate.replica.shard_sum import ShardSum
from quorate.replica.totals import merge_metrics
from quorate.training.batch_loss import batch_finisher, evaluation_job_class
from quorate.training.config import DatasetConfig
from quorate.training.drive import ReadyStep, run_job
from quorate.training.optimizing.cores import threads_of_loop
from quorate.training.outputs import OutputFiles, ShardOutputs, Sink, in_memory
from quorate.training.setup import TrainingSetup
from quorate.training.state import State
from quorate.training.stop import Stops

__all__ = ["Function", "evaluate", "predict"]

AHEAD = 4  # shards per worker that may be done before an earlier shard is


def evaluate(
    setup: TrainingSetup, data: DatasetConfig, averaged: bool | None, stops: Stops, name: str
) -> dict[str, float] | None:
    """Return the means of loss and metrics, and finished totals, over a dataset; None if stopped.

    Args:
        averaged: whether to use the averaged weights. None: use them if there are any.
        name: name of the evaluation in messages: "validation".

    Raises:
        UserError: the dataset is empty, its weight is zero, or there are no averaged weights.
    """
    workers, config = setup.workers, setup.workers.config
    source = workers.evaluation_source(data, setup.shards or workers.least_workers)
    plan = source.plan
    gathered = ShardOutputs(workers.replicas.totals.kept, plan)
    total = TreeSum(plan.steps_per_epoch, ShardSum.add)
    with ExitStack() as stack:
        weights = _evaluable_weights(setup, source, averaged)
        state, parameters = stack.enter_context(weights)
        transport = _transport(setup, data, state, stack, partial(workers.evaluators, state))
        finish = batch_finisher(workers, state, source, parameters)
        job = evaluation_job_class(workers)(
            source,
            parameters,
            range(plan.steps_per_epoch),
            loader_workers=config.loading.processes,
            threads=config.workers.threads,
        )

        def add(ready: ReadyStep) -> None:
            step_sum = tree_sum(ready.parts, plan.shards_of(ready.step), ShardSum.add)
            gathered.put(step_sum.outputs)
            step_sum.outputs = []
            total.put((0, ready.step), finish(ready.step, step_sum))

        done = run_job(
            *(transport, job, add, rules.Sync(), workers.timeout_s, stops),
            say=setup.say,
            copied_shards=workers.stragglers.copied_shards,
            job_name=name,
            before_shard=stops.start_time_limits,
        )
    if done < plan.steps_per_epoch:
        return None
    assert total.root is not None
    found = total.root.denominators
    has_terms = found is None or not found.names or any(found.weights[name] for name in found.names)
    if total.root.weight == 0 or not has_terms:
        raise LossError(
            "weight",
            got=f"0 in all shards of {name}",
            expected="a positive weight in at least one shard",
        )
    means = total.root.means()
    if config.has_phases:
        del means["loss"]  # the sum over all phases has no meaning
    totals = workers.replicas.totals.finished(total.root.totals)
    return merge_metrics(means, merge_metrics(gathered.finished(), totals))


def predict(
    setup: TrainingSetup,
    data: DatasetConfig,
    function: Function | None,
    to: Path | None,
    averaged: bool | None,
    stops: Stops,
) -> Any:
    """Return a function's results for every row, or the folder with the results.

    Args:
        function: the function; None: the model itself, see ``model_of``.
        averaged: as for ``evaluate``.

    Raises:
        OutputError: the results are not by row, or differ in kind between rows.
        UserError: the dataset is empty, there are no averaged weights, the folder has other
            contents, or the prediction was stopped.
    """
    _require_usable(function)
    workers, config, dataset = setup.workers, setup.workers.config, data.dataset
    if to is not None and workers.follows:
        return to  # rank 0 writes the folder
    rows = length(dataset)
    note_own(function)
    called = name_of(function)
    if setup.transport is None:
        workers.begin_prediction(data)  # never returns in a worker process
    with ExitStack() as stack:
        if setup.transport is None:
            stack.enter_context(workers.starting())
        sink: Sink = in_memory(rows)
        if to is not None:
            sink = stack.enter_context(OutputFiles(to, rows))
        # 1. The state; the number of shards may depend on it.
        source, shards = _source_by_shard(setup, data), setup.shards_of_run
        weights = _evaluable_weights(setup, source, averaged)
        state, parameters = stack.enter_context(weights)
        if shards != setup.shards_of_run:
            source = _source_by_shard(setup, data)
        # 2. The workers.
        transport = _transport(
            *(setup, data, state, stack),
            partial(workers.predictors, state, source, setup.say),
            are_able=called is not None,
        )
        plan = source.plan
        plan.lookahead = 2 * len(workers.groups)
        job = PredictionJob(
            source,
            parameters,
            range(plan.steps_per_epoch),
            function=called if transport is setup.transport and called is not None else OWN,
            loader_workers=config.loading.processes,
            threads=config.workers.threads,
        )
        # 3. The shards, in order of completion; and their outputs, in the order of rows.
        waiting: dict[int, Piece] = {}
        done = 0

        def put(ready: ReadyStep) -> None:
            nonlocal done
            for _, total in ready.parts:
                waiting[ready.step] = total.outputs[0]
            while (piece := waiting.pop(done, None)) is not None:
                sink.put(piece.value, len(plan.shard(done, 0)))
                done += 1

        rule = rules.Bounded(AHEAD * len(workers.groups))
        run_job(
            *(transport, job, put, rule, workers.timeout_s, stops),
            say=setup.say,
            copied_shards=workers.stragglers.copied_shards,
            job_name="predict()",
        )
        if done < plan.steps_per_epoch:
            raise UserError("predict", f"stopped before the last row: {stops.reason}")
        about = {
            "global_step": state.global_step,
            "averaged": parameters is not state.parameters,
            "batch_size": plan.batch_size,
            "shards": plan.shards,
        }
        return sink.finish(about)


def _require_usable(function: Function | None) -> None:
    """Refuse a function that cannot predict.

    Raises:
        OutputError: the argument is no function, or asks for the position in a run.
    """
    if function is None:
        return
    expected = "a function(model, batch)"
    if not callable(function):
        raise OutputError("predict", got=type(function).__name__, expected=expected)
    if asks_for_at(function):
        raise OutputError(
            "predict",
            got="a function with the argument at",
            expected="function(model, batch)",
            fix="leave the argument out, because a prediction belongs to no step",
        )


def _source_by_shard(setup: TrainingSetup, data: DatasetConfig) -> Source:
    """Return the rows of a prediction, in steps of one shard of the run's size."""
    most = min(setup.workers.config.batch_size, length(data.dataset))
    shards = min(setup.shards_of_run or 1, most)
    return setup.workers.evaluation_source(data, shards, PlanByShard)


@contextmanager
def _evaluable_weights(
    setup: TrainingSetup, source: Source, averaged: bool | None
) -> Iterator[tuple[State, Flat]]:
    """Prepare a state for workers to evaluate inside the block: its plain or averaged weights.

    Yields:
        The state, and the parameters to evaluate.

    Raises:
        SettingError: there are no averaged weights.
    """
    workers, plan = setup.workers, source.plan
    workers.note_use()
    with ExitStack() as stack:
        stack.enter_context(threads_of_loop(workers.config.workers.threads))
        stack.enter_context(repeatable(workers.replicas.computing, workers.devices))
        plan.course = setup.position_of_evaluation(0)
        state = setup.state_for_evaluation(source)
        plan.course = setup.position_of_evaluation(state.global_step)
        state.model_edits.detect()
        parameters = state.parameters
        if averaged or (averaged is None and state.average is not None):
            if state.average is None:
                expected = "Optimize(ema_decay=)"
                raise SettingError("averaged", averaged, expected, "set it in Trainer")
            parameters = state.average.shadow
        if parameters is state.parameters:
            stack.enter_context(state.optimizer.evaluating())
        yield state, parameters
    state.model_edits.set_baseline()
    workers.replicas.tell(setup.say)


def _transport(
    setup: TrainingSetup,
    data: DatasetConfig,
    state: State,
    stack: ExitStack,
    start: Callable[[], Transport],
    *,
    are_able: bool = True,
) -> Transport:
    """Return the transport of the current loop if its workers can compute, else a new transport.

    Args:
        stack: closes a new transport, and restores the model afterwards.
        start: returns a new transport.
        are_able: whether the workers of the current loop can compute apart from the dataset.
    """
    transport, workers = setup.transport, setup.workers
    can_compute = are_able and transport is not None and transport.can_compute(data.dataset)
    if transport is not None and can_compute and workers.collates(data):
        return transport
    stack.enter_context(unchanged(state.model))
    return stack.enter_context(closing(start()))
