"""What is found out ahead of the workers, once the first step is known: they meet it prepared."""

from __future__ import annotations

from collections.abc import Callable

from quorate.data.source import Source
from quorate.replica.replica import Replica
from quorate.training.probing.cutting import cut_once
from quorate.training.probing.row_alone import try_row_alone
from quorate.training.replicas import Replicas
from quorate.training.state import State


def look_ahead(
    replicas: Replicas,
    state: State,
    make_replica: Callable[[State], Replica],
    source: Source,
    steps: range,
) -> list[str]:
    """Cut the model into stages, if it is to have some, and try a shard of one row, if one comes.

    Args:
        state: as training begins.
        steps: that will be trained.

    Returns:
        What to say of it.

    Raises:
        UserError: the model cannot be cut, or takes no shard of one row.
    """
    lines = cut_once(replicas, state, make_replica, source)
    try_row_alone(state, make_replica, source, steps)
    return lines
