"""The plan of a training loop: the rows of each step and shard, and the number of shards V."""

from __future__ import annotations

from collections.abc import Callable

from quorate.coordination.epochs import SHORT
from quorate.coordination.plan import Plan, PlanByShard
from quorate.data.source import length
from quorate.errors import SettingError
from quorate.replica.phases.losses import PhaseLosses
from quorate.services.checkpoints.files import ValidCheckpoint
from quorate.training.config import DatasetConfig, too_many_shards
from quorate.training.worker_group import WorkerGroup


def plan_of(
    workers: WorkerGroup,
    data: DatasetConfig,
    shards: int | None,
    newest_checkpoint: Callable[[], ValidCheckpoint | None],
) -> Plan:
    """Return the plan of a training loop over a dataset.

    Args:
        shards: V. None: V of the newest checkpoint; without a checkpoint, the number of workers.
        newest_checkpoint: returns the checkpoint to resume from.

    Raises:
        DataError: the argument is no map-style dataset, or is empty.
        SettingError: there are fewer rows than shards, or fewer shards than the rule needs.
    """
    rule, rows = workers.rule, length(data.dataset)
    config = workers.config.with_loading(data.loading)
    sampling, dealt = data.loading.sampling, rows
    if sampling is not None:
        sampling.require_rows(rows)
        dealt = sampling.rows
        if not data.shuffle:
            fix = "leave shuffle out: rows come as they are drawn"
            raise SettingError("shuffle", data.shuffle, "True with Loading(sampling=)", fix)
    if shards is None:
        newest = newest_checkpoint()
        count = min(workers.least_workers, config.batch_size, dealt)
        if newest is None and config.compute.strict and workers.keeps_bits(count):
            expected = "a number: a strict run does not take it from the number of workers"
            raise SettingError("shards", None, expected, f"pass shards={count}")
        shards = count if newest is None else int(newest.record["shards"])
    if shards > dealt:
        of = "the dataset" if sampling is None else "an epoch"
        raise too_many_shards(shards, f"{dealt} rows of {of}")
    if shards < rule.least_shards:
        expected, fix = f"at most the {shards} shards of a batch", "choose a smaller quorum"
        raise SettingError("update", rule.name, expected, f"{fix}, or more shards")
    kind = PlanByShard if rule.by_shard else Plan
    return kind(
        rows=rows,
        batch_size=min(config.batch_size, dealt),
        shards=shards,
        seed=config.seed,
        shuffle=data.shuffle,
        order=config.loading.order,
        last=config.loading.last or SHORT,
        sampling=sampling,
        round=config.loss.round if isinstance(config.loss, PhaseLosses) else None,
    )
