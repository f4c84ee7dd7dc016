"""A shard of one row: tried before the first update, as batch normalisation may refuse the shard.

The number of rows of each shard is known by then. In the middle of an epoch, the error would end
training.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from quorate.coordination.epochs import SHORT
from quorate.coordination.plan import Plan
from quorate.data.source import Source
from quorate.errors import SettingError
from quorate.replica.model import unchanged
from quorate.replica.replica import Replica
from quorate.replica.torch_internals import NORM_BASES
from quorate.training.probing.probe import ALONE, on_shard
from quorate.training.state import State


def try_row_alone(
    state: State,
    make_replica: Callable[[State], Replica],
    source: Source,
    steps: range,
) -> None:
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
        batch, replica = source.load(ticket), make_replica(state)
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
