"""Blame for a non-finite gradient: the shards of the step are computed once more, by this process.

A shard that is finite now was spoilt by its worker, which may have a broken device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quorate.coordination.plan import abridged
from quorate.coordination.tree import TreeSum
from quorate.engines.job import shard_seed
from quorate.errors import NotFiniteError
from quorate.replica.model import unchanged
from quorate.replica.shard_sum import ShardShare
from quorate.replica.streams import Stream
from quorate.training.optimizing.not_finite import is_finite
from quorate.training.optimizing.update import UpdateResult

if TYPE_CHECKING:
    from quorate.training.training_loop import TrainingLoop

NAMES_SHOWN, SHARDS_SHOWN = 6, 3


def skip_update(loop: TrainingLoop, step: int, applied: UpdateResult) -> None:
    """Report the shards to blame for an update that was not made, and skip the update.

    Args:
        applied: the result of the step. No part of the update is made yet.

    Raises:
        NotFiniteError: the run stops at a non-finite gradient (``nonfinite="stop"``).
    """
    state = loop.state
    state.bring_home()
    said, update = _explained(loop, step, applied), state.global_step + 1
    if state.update.optimize.nonfinite == "stop":
        raise NotFiniteError(
            said,
            fix=f"update {update} is not made: look at these rows, lower the learning rate, set "
            "clip_norm, or pass nonfinite='skip'",
        )
    state.update.skip()
    state.not_finite += 1
    loop.setup.say(f"{said}; update {update} is skipped ({state.not_finite} skipped in all)")


def _explained(loop: TrainingLoop, step: int, applied: UpdateResult) -> str:
    """Return a line with the step, shards, workers, rows and parameters to blame."""
    names, shares = applied.not_finite or [], applied.shares
    guilty, is_sum_finite = _computed_again(loop, step, shares)
    end = "each shard is finite, and the sum of the shards is not" if not guilty else ""
    if is_sum_finite:  # a worker has computed something else
        guilty = [share for share in shares if not math.isfinite(share.loss)]
        workers = sorted({share.worker for share in guilty or shares})
        end = (
            "each shard is finite when this process computes the shard again: look for what is "
            f"different on worker {' or '.join(map(str, workers))}"
        )
    said = []
    for share in sorted(guilty):
        rows = abridged(loop.plan.shard(step, share.shard))
        said.append(f"shard {share.shard} (worker {share.worker}), rows {rows}")
    if len(said) > SHARDS_SHOWN:
        said[SHARDS_SHOWN:] = [f"and {len(said) - SHARDS_SHOWN} more shards"]
    where = "; ".join([*said, end] if end else said)
    what = "the loss"
    if names:
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        what = f"the gradient of {', '.join(names[:NAMES_SHOWN])}{more}"
    return f"{what} is not finite in step {step}: {where}"


def _computed_again(
    loop: TrainingLoop, step: int, shares: Sequence[ShardShare]
) -> tuple[list[ShardShare], bool]:
    """Return the shards that are not finite at the parameters of the step, and whether the sum is.

    The only shard of a step is to blame, and a loss over the whole batch is not computed again.
    """
    if len(shares) == 1:
        return [*shares], False
    source, state, workers = loop.source, loop.state, loop.setup.workers
    again = list[ShardShare]()
    with unchanged(state.model), Stream() as stream:
        replica = workers.probe_replica(state)
        tree = TreeSum(source.plan.shards_of(step), replica.add)
        for share in shares:
            batch = source.load((step, share.shard))
            seed = shard_seed(source.plan, step, share.shard)
            replica.loss_call.place(source.plan, step, batch.rows)
            shard_sum = replica.gradient(batch.data, len(batch.rows), stream, seed)
            if not is_finite(shard_sum):
                again.append(share)
            tree.put((0, share.shard), shard_sum)
    are_finite = all(is_finite(each) and not each.awaits_totals for each in tree.parts.values())
    return again, are_finite and workers.config.gather is None
