"""Trials before the workers start, once the first step is known: cuts, and shards of one row."""

from __future__ import annotations

from collections.abc import Callable

from quorate.data.source import Source
from quorate.replica.replica import Replica
from quorate.training.probing.cutting import cut_once
from quorate.training.probing.row_alone import try_row_alone
from quorate.training.replicas import ReplicaFactory
from quorate.training.state import State


def look_ahead(
    replicas: ReplicaFactory,
    state: State,
    make_replica: Callable[[State], Replica],
    source: Source,
    steps: range,
) -> list[str]:
    """Cut the model into stages, if there are any, and try a shard of one row, if one will come.

    Args:
        state: the state at the beginning of training.
        steps: the steps to train.

    Returns:
        Lines for the user.

    Raises:
        UserError: the model cannot be cut, or cannot compute a shard of one row.
    """
    lines = cut_once(replicas, state, make_replica, source)
    try_row_alone(state, make_replica, source, steps)
    return lines
