"""Blame for a non-finite gradient: each shard of the step is computed once more by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from quorate.coordination.plan import abridged
from quorate.data.source import Source
from quorate.engines.job import shard_seed
from quorate.errors import NotFiniteError
from quorate.replica.model import unchanged
from quorate.replica.replica import Replica
from quorate.replica.shard_sum import Share
from quorate.replica.streams import Stream
from quorate.training.optimizing.not_finite import is_finite
from quorate.training.optimizing.update import Applied
from quorate.training.state import State

NAMES_SHOWN, SHARDS_SHOWN = 6, 3


def not_made(
    step: int,
    applied: Applied,
    state: State,
    source: Source,
    make_replica: Callable[[], Replica],
    say: Callable[[str], None],
) -> None:
    """Report the shards to blame for an update that was not made, and skip the update.

    Args:
        applied: the result of the step. No part of the update is made yet.
        make_replica: see ``explained``.

    Raises:
        NotFiniteError: the run stops at a non-finite gradient (``nonfinite="stop"``).
    """
    assert applied.not_finite is not None
    said = explained(step, applied.shares, applied.not_finite, source, state.model, make_replica)
    update = state.global_step + 1
    if state.update.optimize.nonfinite == "stop":
        raise NotFiniteError(
            said,
            fix=f"update {update} is not made: look at these rows, lower the learning rate, set "
            "clip_norm, or pass nonfinite='skip'",
        )
    state.update.skip()
    state.not_finite += 1
    say(f"{said}; update {update} is skipped ({state.not_finite} skipped in all)")


def explained(
    step: int,
    shares: Sequence[Share],
    names: Sequence[str],
    source: Source,
    model: torch.nn.Module,
    make_replica: Callable[[], Replica],
) -> str:
    """Return a line with the step, shards, workers, rows and parameters to blame.

    Args:
        shares: the step's shards.
        names: the parameters whose gradient is not finite in the sum.
        model: the model with the parameters that the step was computed from.
        make_replica: makes a replica of the model; may return the model itself.
    """
    said = []
    for share in sorted(_guilty(step, shares, source, model, make_replica)):
        rows = abridged(source.plan.shard(step, share.shard))
        said.append(f"shard {share.shard} (worker {share.worker}), rows {rows}")
    if len(said) > SHARDS_SHOWN:
        said[SHARDS_SHOWN:] = [f"and {len(said) - SHARDS_SHOWN} more shards"]
    where = "; ".join(said) or "each shard is finite, and the sum of the shards is not"
    what = "the loss"
    if names:
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        what = f"the gradient of {', '.join(names[:NAMES_SHOWN])}{more}"
    return f"{what} is not finite in step {step}: {where}"


def _guilty(
    step: int,
    shares: Sequence[Share],
    source: Source,
    model: torch.nn.Module,
    make_replica: Callable[[], Replica],
) -> Iterator[Share]:
    if len(shares) == 1:
        yield shares[0]
        return
    with unchanged(model), Stream() as stream:
        replica = make_replica()
        for share in shares:
            batch = source.load((step, share.shard))
            seed = shard_seed(source.plan, step, share.shard)
            replica.called.place(source.plan, step, batch.rows)
            shard_sum = replica.gradient(batch.data, len(batch.rows), stream, seed)
            if not is_finite(shard_sum):
                yield share
            replica.recycle(shard_sum)
