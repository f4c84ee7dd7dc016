"""Checks of the first step before there are workers, so that no run fails hours later.

A model is cut into stages once, for all replicas. A shard of one row is tried, because batch
normalisation may refuse the shard in the middle of an epoch. The metrics that the end of the run
needs are computed from a first shard: a mistyped name is found in seconds. The graph of the model
for summaries is computed here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from quorate.coordination.epochs import SHORT
from quorate.coordination.keys import key
from quorate.coordination.plan import Plan
from quorate.data.source import Source, length
from quorate.errors import CutError, SettingError
from quorate.machine.devices import current
from quorate.machine.memory_fraction import free_cache
from quorate.replica.model import unchanged
from quorate.replica.outputs.rows import Piece
from quorate.replica.pipeline.called import call_of
from quorate.replica.pipeline.chosen import chosen, described
from quorate.replica.pipeline.split import Split
from quorate.replica.streams import Stream
from quorate.replica.torch_internals import NORM_BASES
from quorate.replica.witness.forward_graph import ForwardGraph, GraphNode, module_tree
from quorate.training.callbacks import VALIDATION, Callback, metrics_of
from quorate.training.config import DatasetConfig
from quorate.training.outputs import ShardOutputs
from quorate.training.probing.probe import ALONE, on_shard
from quorate.training.state import State
from quorate.training.validation import BestMetric, Validation
from quorate.training.worker_group import WorkerGroup


def cut_once(workers: WorkerGroup, state: State, source: Source) -> list[str]:
    """Cut the model by the first shard of the first step, as the cut of all replicas.

    Returns:
        Lines for the user; none without stages, or if the model is cut already.

    Raises:
        CutError: the model cannot be cut.
        LossError: the loss function does not call the model exactly once.
    """
    replicas = workers.replicas
    split, decided = replicas.spread, replicas.computing.decided
    if not isinstance(split, Split) or decided["split"] is not None:
        return []
    with unchanged(state.model):
        batch, replica = source.load((0, 0)), workers.probe_replica(state)
        if replica.is_compiled_by_script:  # stages would compute uncompiled code
            why = "the script compiles the model, a part of it or the loss with torch.compile"
            raise CutError(why, "leave torch.compile out, or take one device for a replica")
        with on_shard(replica, batch, source.plan) as shard:
            call = call_of(replica, batch.data, len(batch.rows), shard.stream, shard.seed)
            found = chosen(replica.model, split, call)
    replicas.compute_as({**decided, "split": found.names})
    return [described(found)]


# --- a shard of one row ---------------------------------------------------------------------------


def try_row_alone(workers: WorkerGroup, state: State, source: Source, steps: range) -> None:
    """Compute the first shard of a single row, if there will be one: BatchNorm may refuse it.

    The refusal depends on the shape: (1, C) has one value per channel, an image has many. So the
    shard is tried with its own rows.

    Args:
        state: the state at the beginning of training.
        steps: the steps to train.

    Raises:
        SettingError: training would end at the step of the shard.
    """
    ticket, model = source.plan.row_alone(steps), state.model
    if ticket is None or not any(isinstance(m, NORM_BASES) for m in model.modules()):
        return
    with unchanged(model), suppress(Exception):  # training will show any other error
        batch, replica = source.load(ticket), workers.probe_replica(state)
        as_it_is = replica.watched(lambda loss: loss)
        try:
            with on_shard(replica, batch, source.plan) as shard, as_it_is:
                replica.recycle(replica.gradient(batch.data, 1, shard.stream, shard.seed))
            return
        except ValueError as error:
            if ALONE not in str(error):
                return
            norm = _raised_in(error, replica.model)
        raised = _row_alone(source.plan, ticket, norm)
    raise raised


def _raised_in(error: BaseException, model: torch.nn.Module) -> str:
    """Return the normalisation that raised an exception: ``'norm' (BatchNorm1d)``."""
    names = {id(module): name for name, module in model.named_modules()}
    trace, found = error.__traceback__, "BatchNorm"
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, NORM_BASES) and id(module) in names:
            found = f"{names[id(module)]!r} ({type(module).__name__})"
        trace = trace.tb_next
    return found


def _row_alone(plan: Plan, ticket: tuple[int, int], norm: str) -> SettingError:
    """Return the error for a plan with a shard of one row, refused by a norm, and its cures."""
    size, shards, rows = plan.batch_size, plan.shards, plan.dealt_rows
    last = (rows - 1) % size + 1
    cures = [
        f"batch_size={larger}"
        for larger in range(size + 1, min(rows, 2 * size + 2 * shards) + 1)
        if min(larger, (rows - 1) % larger + 1) >= 2 * shards
    ][:1]
    if min(last, size) >= 2:
        cures.append(f"shards={min(last, size) // 2}")
    if plan.last == SHORT and size >= 2 * shards:
        cures += ['Loading(last="join")', 'Loading(last="drop")']
    return SettingError(
        "batch_size",
        size,
        f"two rows or more in each shard: of {rows:,} rows the last batch has {last}, and in step "
        f"{ticket[0]} a shard of {shards} has one, in which {norm} has one value per channel, of "
        "which there is no variance",
        f"pass {', or '.join(cures)}, with which no shard has one row alone"
        if cures
        else "leave rows out of the dataset, or add some",
    )


# --- metrics of the validation set ----------------------------------------------------------------


def required_metrics(
    workers: WorkerGroup, validation: Validation | None, callbacks: Sequence[Callback]
) -> list[tuple[str, str]]:
    """Return the metrics that a run needs from its validation set, each with whoever needs it.

    Raises:
        SettingError: a metric is needed, and there is no validation set.
    """
    required = metrics_of(callbacks)
    if validation is None:
        for who, name in required:
            expected, fix = "none, as there is no validation set", "pass fit(validation=)"
            raise SettingError(f"the metric of {who}", name, expected, fix)
        return []
    if validation.best is not None:
        required.append(("best", BestMetric(validation.best).name))
    return required + [
        ("schedule_metric", metric.removeprefix(VALIDATION))
        for optimize in workers.config.optimize.values()
        if (metric := optimize.schedule_metric or "").startswith(VALIDATION)
    ]


def require_metrics(
    workers: WorkerGroup, state: State, data: DatasetConfig, required: Sequence[tuple[str, str]]
) -> None:
    """Compute a first shard of the validation set, and look for the required metrics.

    Raises:
        SettingError: a metric is missing.
        Exception: an error of user code.
    """
    names, are_all = _tried(workers, state, data) if required else (set(), False)
    for who, name in required:
        if name not in names and are_all:
            where = who if who in ("best", "schedule_metric") else f"the metric of {who}"
            expected = f"one of {', '.join(sorted(names))}"
            raise SettingError(where, name, expected, "the loss function names them")


def _tried(workers: WorkerGroup, state: State, data: DatasetConfig) -> tuple[set[str], bool]:
    """Return the metrics of a first shard, and whether the list is complete.

    Finished totals may need more rows than a shard has: then their names are unknown. The same
    holds for a loss over whole batches.
    """
    config, rows = workers.config, length(data.dataset)
    if config.gather is not None:
        return set(), False
    shards = min(config.shards or len(workers.groups), config.batch_size, rows)
    source = workers.evaluation_source(data, shards)
    first, plan = source.load((0, 0)), source.plan
    with unchanged(state.model), state.optimizer.evaluating():
        replica = workers.probe_replica(state)
        with current(replica.device), Stream() as stream:
            replica.pull(state.parameters, version=object())
            seed = key("evaluation", plan.seed, 0, 0)
            replica.loss_call.place(plan, 0, first.rows, of_phase=False)
            # Not compiled: only one shard is computed.
            with replica.watched(lambda loss: loss):
                total = replica.evaluation(first.data, len(first.rows), stream, seed)
    names = set(total.metrics)
    totals = workers.replicas.totals
    try:
        names |= totals.finished(total.totals).keys()
        few = Plan(rows=len(first.rows), batch_size=len(first.rows), shards=1, shuffle=False)
        gathered = ShardOutputs(totals.kept, few)
        gathered.put([Piece(0, 0, value) for _, _, value in total.outputs])
        names |= gathered.finished().keys()
    except Exception:  # the user's function may work with all rows
        return names, False
    return names, True


# --- the graph of the model -----------------------------------------------------------------------


def graph_of(workers: WorkerGroup, state: State, source: Source) -> list[GraphNode]:
    """Compute shard 0 of step 0 once more, for the graph of its forward pass. Raises nothing.

    The result is thrown away. Afterwards the model, shared containers of its code and all
    generators are as before. The graph is not computed in the probe, where a shard must be computed
    exactly as in training.
    """
    shared = workers.replicas.contents()
    try:
        with unchanged(state.model):
            replica = workers.probe_replica(state)
            replica.witness.is_silent = True
            replica.pull(state.parameters, version=object())
            graph, batch = ForwardGraph(replica.model), source.load((0, 0))
            with on_shard(replica, batch, source.plan) as shard, replica.watched(graph.watch):
                replica.evaluation(batch.data, shard.rows, shard.stream, shard.seed, training=True)
        return graph.nodes() or module_tree(state.model)
    except Exception:  # user code that cannot be watched
        return module_tree(state.model)
    finally:
        shared.restore()
        if workers.has_processes:
            free_cache(workers.devices)
