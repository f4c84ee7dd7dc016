"""Metrics needed for the end of a run, checked by computing a shard before the first update.

So a mistyped name is found in seconds, and not after an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quorate.coordination.keys import key
from quorate.coordination.plan import Plan
from quorate.data.source import Source, length
from quorate.errors import SettingError
from quorate.machine.devices import current
from quorate.replica.model import unchanged
from quorate.replica.outputs.rows import Piece
from quorate.replica.streams import Stream
from quorate.training.callbacks import VALIDATION, Callback, checked, metrics_of
from quorate.training.config import DatasetConfig
from quorate.training.predicting.gathered import Gathered
from quorate.training.state import State
from quorate.training.validation import Best, Validation
from quorate.training.worker_group import WorkerGroup


def looking(
    workers: WorkerGroup,
    validation: Validation | None,
    rows: DatasetConfig | None,
    callbacks: Sequence[Callback],
) -> Callable[[State], None]:
    """Return a function that checks whether the validation set gives all needed metrics.

    The function raises ``SettingError`` if a metric is missing, and any error of user code.

    Args:
        rows: the rows of the validation set.

    Raises:
        SettingError: a metric is needed, and there is no validation set.
    """
    needed = metrics_of(checked(callbacks))
    if validation is None or rows is None:
        for who, name in needed:
            expected, fix = "none, as there is no validation set", "pass fit(validation=)"
            raise SettingError(f"the metric of {who}", name, expected, fix)
        return lambda _: None
    if validation.best is not None:
        needed.append(("best", Best(validation.best).name))
    needed += [
        ("schedule_metric", metric.removeprefix(VALIDATION))
        for optimize in workers.config.optimize.values()
        if (metric := optimize.schedule_metric or "").startswith(VALIDATION)
    ]
    if not needed:
        return lambda _: None
    data = rows

    def look(state: State) -> None:
        names, are_all = _tried(workers, state, data)
        for who, name in needed:
            if name not in names and are_all:
                where = who if who in ("best", "schedule_metric") else f"the metric of {who}"
                expected = f"one of {', '.join(sorted(names))}"
                raise SettingError(where, name, expected, "the loss function names them")

    return look


def _tried(workers: WorkerGroup, state: State, data: DatasetConfig) -> tuple[set[str], bool]:
    """Return the metrics of a first shard, and whether the list is complete.

    Finished totals may need more rows than a shard has: then their names are unknown. The same
    holds for a loss over whole batches.
    """
    config, rows = workers.config, length(data.dataset)
    if config.gather is not None:
        return set(), False
    batch = min(config.batch_size, rows)
    shards = min(config.shards or len(workers.groups), batch)
    plan = Plan(rows=rows, batch_size=batch, shards=shards, seed=config.seed, shuffle=False)
    first = Source(data.dataset, plan, data.loading.collate).load((0, 0))
    with unchanged(state.model), state.optimizer.evaluating():
        replica = workers.probe_replica(state)
        with current(replica.device), Stream() as stream:
            replica.pull(state.parameters, version=object())
            seed = key("evaluation", plan.seed, 0, 0)
            replica.called.place(plan, 0, first.rows, of_phase=False)
            # Not compiled: only one shard is computed.
            with replica.watched(lambda loss: loss):
                total = replica.evaluation(first.data, len(first.rows), stream, seed)
    names = set(total.metrics)
    totals = workers.replicas.totals
    try:
        names |= totals.finished(total.totals).keys()
        few = Plan(rows=len(first.rows), batch_size=len(first.rows), shards=1, shuffle=False)
        gathered = Gathered(totals.kept, few)
        gathered.put([Piece(0, 0, value) for _, _, value in total.outputs])
        names |= gathered.finished().keys()
    except Exception:  # the user's function may work with all rows
        return names, False
    return names, True
