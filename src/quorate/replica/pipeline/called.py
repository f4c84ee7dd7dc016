"""The call of a model by the loss function for one shard, as the example for a cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from quorate.errors import LossError
from quorate.machine.devices import Group, device_types
from quorate.replica.loss import Loss
from quorate.replica.pipeline.cut import cut
from quorate.replica.pipeline.followed import autocast
from quorate.replica.pipeline.stage import FIX
from quorate.replica.pipeline.stage_graph import StageGraph
from quorate.replica.replica import Replica
from quorate.replica.streams import Stream
from quorate.replica.turns import Turns


class ModelCall(NamedTuple):
    """The arguments of a model's call, and the state of autocast."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: tuple[tuple[bool, torch.dtype], ...]  # of each of ``device_types()``

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """Set autocast inside the block as it was at the call."""
        with ExitStack() as stack:
            for kind, (is_on, dtype) in zip(device_types(), self.autocast, strict=True):
                if is_on or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_on))
            yield


def call_of(replica: Replica, batch: Any, rows: int, stream: Stream, seed: int) -> ModelCall:
    """Return the call of the model in a shard's forward pass, computed in one piece.

    Arguments as for ``Replica.gradient``.

    Raises:
        LossError: the model was not called exactly once.
        Exception: an error of user code.
    """
    calls: list[ModelCall] = []

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(ModelCall(args, kwargs, autocast()))

    def afresh(function: Loss) -> Callable[..., Any]:
        def loss(*args: Any) -> Any:
            calls.clear()  # a repeated computation of the shard does not count
            return function(*args)

        return loss

    handle = replica.model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with replica.watched(afresh):
            replica.evaluation(batch, rows, stream, seed, training=True)
    finally:
        handle.remove()
    if len(calls) != 1:
        raise LossError(f"the loss called the model {len(calls)} times, expected once", fix=FIX)
    return calls[0]


def cut_by(
    model: torch.nn.Module, names: Sequence[str], call: ModelCall, devices: Group | None
) -> tuple[StageGraph, ...]:
    """Cut a model at named modules, by a call of the model; as ``cut``.

    Runs in a turn, because the cut compares generators: threads that load rows draw from them.
    """
    with call.surroundings():
        return Turns().run(lambda _: cut(model, names, *call[:2], devices or ()))
