"""The cut of a model into stages: made once before there are workers, and the same for all."""

from __future__ import annotations

from collections.abc import Callable

from quorate.data.source import Source
from quorate.errors import CutError
from quorate.replica.model import unchanged
from quorate.replica.pipeline.called import call_of
from quorate.replica.pipeline.chosen import chosen, described
from quorate.replica.pipeline.split import Split
from quorate.replica.replica import Replica
from quorate.training.probing.probe import on_shard
from quorate.training.replicas import ReplicaFactory
from quorate.training.state import State


def cut_once(
    replicas: ReplicaFactory, state: State, make_replica: Callable[[State], Replica], source: Source
) -> list[str]:
    """Cut the model by the first shard of the first step, as the cut of all replicas.

    Returns:
        Lines for the user; none without stages, or if the model is cut already.

    Raises:
        CutError: the model cannot be cut.
        LossError: the loss function does not call the model exactly once.
    """
    split, decided = replicas.spread, replicas.computing.decided
    if not isinstance(split, Split) or decided["split"] is not None:
        return []
    with unchanged(state.model):
        batch, replica = source.load((0, 0)), make_replica(state)
        if replica.is_compiled_by_script:  # stages would compute uncompiled code
            why = "the script compiles the model, a part of it or the loss with torch.compile"
            raise CutError(why, "leave torch.compile out, or take one device for a replica")
        with on_shard(replica, batch, source.plan) as shard:
            call = call_of(replica, batch.data, len(batch.rows), shard.stream, shard.seed)
            found = chosen(replica.model, split, call)
    replicas.compute_as({**decided, "split": found.names})
    return [described(found)]
