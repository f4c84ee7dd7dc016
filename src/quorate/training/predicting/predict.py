"""A prediction: a function's results for every row of a dataset, in order, by all workers.

Each step is one shard, and workers compute shards in turn. Results are put in the order of rows.
The lead of a worker over another is bounded, and so is the memory of waiting results: only the
results themselves grow with the dataset, and results may be written to files.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from quorate.coordination import rules
from quorate.coordination.plan import PlanByShard
from quorate.data.source import Source, length
from quorate.engines import Transport
from quorate.engines.prediction import OWN, Function, Prediction, name_of, note_own
from quorate.errors import OutputError, UserError
from quorate.replica.beside.asks import asks_for_at
from quorate.replica.model import unchanged
from quorate.replica.outputs.rows import Piece
from quorate.training.config import DatasetConfig
from quorate.training.drive import Ready, run_job
from quorate.training.predicting.columns import Sink, in_memory
from quorate.training.predicting.evaluable import evaluable_state
from quorate.training.predicting.files import Files
from quorate.training.setup import TrainingSetup
from quorate.training.stop import Stops
from quorate.training.worker_group import WorkerGroup

__all__ = ["Function", "predict"]

AHEAD = 4  # shards per worker that may be done before an earlier shard is


def predict(
    workers: WorkerGroup,
    setup: TrainingSetup,
    data: DatasetConfig,
    function: Function | None,
    *,
    to: Path | None,
    averaged: bool | None,
    transport: Transport | None,
    stops: Stops,
    say: Callable[[str], None],
) -> Any:
    """Return a function's results for every row, or the folder with the results.

    Args:
        function: the function; None: the model itself, see ``model_of``.
        averaged: as for ``evaluate``.
        transport: transport of the current loop, if there is one. Its workers compute if they have
            the dataset and can find the function.

    Raises:
        OutputError: the results are not by row, or differ in kind between rows.
        UserError: the dataset is empty, there are no averaged weights, the folder has other
            contents, or the prediction was stopped.
    """
    if function is not None and not callable(function):
        raise OutputError(
            "predict",
            got=type(function).__name__,
            expected="a function(model, batch)",
        )
    if function is not None and asks_for_at(function):
        raise OutputError(
            "predict",
            got="a function with the argument at",
            expected="function(model, batch)",
            fix="leave the argument out, because a prediction belongs to no step",
        )
    if to is not None and workers.follows:
        return to  # rank 0 writes the folder
    dataset, collate = data.dataset, data.loading.collate
    rows = length(dataset)
    config, shards = workers.config, setup.shards or setup.saved_shards or 1
    note_own(function)
    if transport is None:
        workers.begin_prediction(data)  # never returns in a worker process
    with ExitStack() as stack:
        if transport is None:
            stack.enter_context(workers.starting())
        sink: Sink = in_memory(rows)
        if to is not None:
            sink = stack.enter_context(Files(to, rows))
        # 1. The state; the number of shards may depend on it.
        source = Source(dataset, _plan(rows, config.batch_size, shards, config.seed), collate)
        state, parameters = stack.enter_context(
            evaluable_state(workers, setup, source, averaged, say)
        )
        if shards != (now := setup.shards or setup.saved_shards or 1):
            source = Source(dataset, _plan(rows, config.batch_size, now, config.seed), collate)
        # 2. The workers.
        called = name_of(function)
        if (
            transport is None
            or called is None
            or not transport.can_compute(dataset)
            or not workers.collates(data)
        ):
            stack.enter_context(unchanged(state.model))
            transport = stack.enter_context(closing(workers.predictors(state, source, say)))
            called = OWN
        plan = source.plan
        plan.lookahead = 2 * len(workers.groups)
        job = Prediction(
            source,
            parameters,
            range(plan.steps_per_epoch),
            function=called,
            loader_workers=config.loading.processes,
            threads=config.workers.threads,
        )
        # 3. The shards, in order of completion; and their outputs, in the order of rows.
        _drive(job, transport, workers, sink, stops, say)
        about = {
            "global_step": state.global_step,
            "averaged": parameters is not state.parameters,
            "batch_size": plan.batch_size,
            "shards": plan.shards,
        }
        return sink.finish(about)


def _plan(rows: int, batch_size: int, shards: int, seed: int) -> PlanByShard:
    batch = min(batch_size, rows)
    return PlanByShard(
        rows=rows, batch_size=batch, shards=min(shards, batch), seed=seed, shuffle=False
    )


def _drive(
    job: Prediction,
    transport: Transport,
    workers: WorkerGroup,
    sink: Sink,
    stops: Stops,
    say: Callable[[str], None],
) -> None:
    """Pass the outputs of all shards to a sink, in the order of rows.

    Raises:
        UserError: the prediction was stopped before the last row.
    """
    plan = job.plan
    waiting: dict[int, Piece] = {}
    taken = 0

    rule = rules.Bounded(AHEAD * len(workers.groups))

    def take(ready: Ready) -> None:
        nonlocal taken
        for _, total in ready.parts:
            waiting[ready.step] = total.outputs[0]
        while (piece := waiting.pop(taken, None)) is not None:
            sink.put(piece.value, len(plan.shard(taken, 0)))
            taken += 1

    run_job(
        *(transport, job, take, rule, workers.timeout_s, stops),
        say=say,
        copied_shards=workers.stragglers.copied_shards,
        called="predict()",
    )
    if taken < plan.steps_per_epoch:
        raise UserError("predict", f"stopped before the last row: {stops.reason}")
