"""Blame for a non-finite gradient: each shard of the step is computed once more by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from quorate.coordination.plan import abridged
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
    said, names = [], applied.not_finite or []
    for share in sorted(_guilty(loop, step, applied.shares)):
        rows = abridged(loop.plan.shard(step, share.shard))
        said.append(f"shard {share.shard} (worker {share.worker}), rows {rows}")
    if len(said) > SHARDS_SHOWN:
        said[SHARDS_SHOWN:] = [f"and {len(said) - SHARDS_SHOWN} more shards"]
    where = "; ".join(said) or "each shard is finite, and the sum of the shards is not"
    what = "the loss"
    if names:
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        what = f"the gradient of {', '.join(names[:NAMES_SHOWN])}{more}"
    return f"{what} is not finite in step {step}: {where}"


def _guilty(loop: TrainingLoop, step: int, shares: Sequence[ShardShare]) -> Iterator[ShardShare]:
    """Yield the shards whose own gradient is not finite, at the parameters of the step."""
    if len(shares) == 1:
        yield shares[0]
        return
    source, state = loop.source, loop.state
    with unchanged(state.model), Stream() as stream:
        replica = loop.setup.workers.probe_replica(state)
        for share in shares:
            batch = source.load((step, share.shard))
            seed = shard_seed(source.plan, step, share.shard)
            replica.loss_call.place(source.plan, step, batch.rows)
            shard_sum = replica.gradient(batch.data, len(batch.rows), stream, seed)
            if not is_finite(shard_sum):
                yield share
            replica.recycle(shard_sum)
