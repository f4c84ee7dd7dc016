"""The history check: whether the result of a shard depends on the shards computed before.

State kept from the first shard on is a cache if any shard would have produced the same state: a
mask, positions. A running maximum, earlier weights, or the mean of the first batch are not,
although the same shard gives the same result when repeated: a worker that began later, or
elsewhere, has another state. So two shards are computed in one order by a replica, and in the
reverse order by a new replica; one of the two from other parameters, as after some updates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from quorate.replica.flat import Flat
from quorate.replica.witness.again import CURE, MOST_NAMED, Computed, advice, place
from quorate.replica.witness.kept import CACHED, Kept, changed


class Pair(NamedTuple):
    """The results of two shards."""

    first: Computed
    other: Computed


def moved(parameters: Flat) -> Flat:
    """Return other parameters of the same order of magnitude, like those of a later update."""
    later = parameters.layout.new(parameters.device)
    for name, view in later.views.items():
        view.copy_(parameters.views[name]).mul_(1.125).add_(0.01)
    return later


def forget_cached(model: torch.nn.Module) -> None:
    """Empty the ``functools`` caches on methods of a model's classes: they outlive a replica."""
    for kind in {base for module in model.modules() for base in type(module).__mro__}:
        for value in vars(kind).values():
            if isinstance(value, CACHED):
                value.cache_clear()


def history_doubts(model: torch.nn.Module, since: Kept, one: Pair, another: Pair) -> list[str]:
    """Return messages about kept state that makes results depend on the order of shards.

    Args:
        model: the model, for names.
        since: the state before any shard was computed.
        one: results of a replica with the first shard first.
        another: results of a replica with the second shard first.
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
