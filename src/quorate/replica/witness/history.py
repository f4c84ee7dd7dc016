"""Whether what a shard gives depends on the shards that were computed before it.

What a model or a loss function keeps from its first shard on is a cache if any shard would have
made the same of it: a mask, positions. A maximum so far, the weights as they once were, the mean of
the first batch are none, though the same shard gives the same when it is computed again: a worker
that began later, or elsewhere, has others. So two shards are computed in one order by a replica,
and in the other order by a new one; one of the two from other parameters, as after some updates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from quorate.replica.flat import Flat
from quorate.replica.witness.again import CURE, MOST_NAMED, Computed, advice, place
from quorate.replica.witness.kept import CACHED, Kept, changed


class Pair(NamedTuple):
    """What two shards gave."""

    first: Computed
    other: Computed


def moved(parameters: Flat) -> Flat:
    """Return other values, of the same order of magnitude: those of a later update, say."""
    later = parameters.layout.new(parameters.device)
    for name, view in later.views.items():
        view.copy_(parameters.views[name]).mul_(1.125).add_(0.01)
    return later


def forget_cached(model: torch.nn.Module) -> None:
    """Empty the caches of ``functools`` on methods of a model's classes: they outlive a replica."""
    for kind in {base for module in model.modules() for base in type(module).__mro__}:
        for value in vars(kind).values():
            if isinstance(value, CACHED):
                value.cache_clear()


def history_doubts(model: torch.nn.Module, since: Kept, one: Pair, another: Pair) -> list[str]:
    """Return what is kept that makes shards give other results in another order.

    Args:
        model: for names.
        since: what was kept before any shard was computed.
        one: of a replica that computed the first shard first.
        another: of one that computed the other shard first.
    """
    if all(mine.result == its.result for mine, its in zip(one, another, strict=True)):
        return []
    names = changed(since, one.first.after)
    pairs = zip(one, another, strict=True)
    parted = {name for mine, its in pairs for name in changed(mine.after, its.after)}
    return [
        f"{place(model, name)} is set while shards are computed, and results depend on the order "
        f"of shards: {CURE}; set it before training, or {advice(name, one.first.after)}"
        for name in ([name for name in names if name in parted] or names)[:MOST_NAMED]
    ]
