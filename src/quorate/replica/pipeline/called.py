"""The call of a model by the loss function, with what it is given of one shard: a cut needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from quorate.errors import LossError
from quorate.replica.loss import Loss
from quorate.replica.pipeline.cut import cut
from quorate.replica.pipeline.stage import FIX
from quorate.replica.pipeline.stage_graph import StageGraph
from quorate.replica.replica import Replica
from quorate.replica.streams import Stream
from quorate.replica.turns import Turns


class Call(NamedTuple):
    """What a model is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call_of(replica: Replica, batch: Any, rows: int, stream: Stream, seed: int) -> Call:
    """Compute a shard in one piece, and return how the model was called; as ``Replica.gradient``.

    Raises:
        LossError: it was not called once.
        Whatever user code raises.
    """
    calls: list[Call] = []

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(Call(args, kwargs))

    def afresh(function: Loss) -> Callable[..., Any]:
        def loss(*args: Any) -> Any:
            calls.clear()  # a shard may be computed again, which does not count
            return function(*args)

        return loss

    handle = replica.model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with replica.watched(afresh):
            replica.recycle(replica.gradient(batch, rows, stream, seed))
    finally:
        handle.remove()
    if len(calls) != 1:
        raise LossError(f"the loss called the model {len(calls)} times, expected once; {FIX}")
    return calls[0]


def cut_by(model: torch.nn.Module, names: Sequence[str], call: Call) -> tuple[StageGraph, ...]:
    """Cut a model at named modules, by a call of it; as ``cut``.

    In a turn: threads that load rows draw from generators, which the cut looks at.
    """
    return Turns().run(lambda _: cut(model, names, call.args, call.kwargs))
