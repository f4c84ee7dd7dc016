"""A stage: the part of the model for a single device, forward and backward, shard by shard.

Each stage calls the user's loss function with the model, whose forward pass is replaced by the
stage's. So every stage reads its inputs from the batch in the way of the loss function, and draws
the same numbers before the call of the model. All stages but the last leave the loss function in
this call; the last stage returns the model's output, and the loss function continues.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from quorate.errors import LossError
from quorate.replica.loss import LossResult
from quorate.replica.pipeline.boundary import (
    BackwardMessage,
    EnteredValues,
    ForwardMessage,
    passed,
    roots_of,
)
from quorate.replica.pipeline.draws import none_drawn
from quorate.replica.pipeline.on_devices.device_stream import DeviceStream
from quorate.replica.pipeline.routes import StageRoute
from quorate.replica.pipeline.stage_graph import OUTPUT, StageGraph
from quorate.replica.pipeline.two_parts import Root, SecondPart, derive, derive_first
from quorate.replica.streams import Stream

FIX = "call model(...) once in the loss function, or leave split out"


class ForwardEnded(BaseException):
    """The signal of a finished forward part; the last stage computes the rest."""


class StageComputing(NamedTuple):
    """The computation of a replica, the same for all of its stages."""

    model: torch.nn.Module
    trained: Mapping[str, torch.nn.Parameter]
    begin: Callable[[Any, int], None]  # begins a shard, with its seed: see ``Replica``
    read: Callable[[Any, int], LossResult]  # calls the loss function with a batch of n rows
    stream: Stream | DeviceStream


class ForwardResults(NamedTuple):
    """The results of a shard's forward pass in a stage."""

    to: Mapping[int, ForwardMessage]  # by stage
    buffers: Mapping[str, torch.Tensor]  # by name, as left by the shard
    outcome: LossResult | None  # of the last stage


class BackwardResults(NamedTuple):
    """The results of a shard's backward pass in a stage."""

    to: Mapping[int, BackwardMessage]  # by stage
    gradients: Mapping[str, torch.Tensor]  # of the stage's own parameters
    weight: float  # to multiply the gradients by
    second: SecondPart | None = None  # the rest of the gradients, not computed yet


class Stage:
    """A stage, with the shards in progress.

    Args:
        graph: the graph of the stage.
        route: the messages of the stage.
        computing: the computation of the replica.
    """

    def __init__(self, graph: StageGraph, route: StageRoute, computing: StageComputing) -> None:
        self.graph, self.route = graph, route
        self._computing = computing
        self._stream = computing.stream
        # Of the model's own forward pass, which is replaced while a shard is computed.
        self._signature = inspect.signature(computing.model.forward)
        self._shards: dict[int, _OpenShard] = {}

    def forward(
        self,
        number: int,
        batch: Any,
        rows: int,
        seed: int,
        receive: Callable[[], Sequence[ForwardMessage]],
    ) -> ForwardResults:
        """Compute a shard's forward pass.

        Args:
            number: number of the shard.
            receive: returns the messages of earlier stages about the shard. Blocks.
        """
        shard = self._shards[number] = _OpenShard(seed)
        self._computing.begin(self._stream, seed)

        def call(*args: Any, **kwargs: Any) -> Any:
            if shard.was_called:
                raise LossError("the loss called the model twice, expected once", fix=FIX)
            shard.was_called = True
            values = self._arguments(args, kwargs)
            arrived = receive()
            for each in arrived:
                values |= shard.entered.enter(each)
            # The position of the previous stage, which includes the draws of earlier stages.
            if arrived and arrived[-1].position is not None:
                self._stream.generator.set_state(arrived[-1].position)
            given = self.graph.run(values)
            if self.graph.is_last:
                return given[OUTPUT]
            shard.given = given
            raise ForwardEnded

        try:
            with none_drawn(), _forward_is(self._computing.model, call):
                shard.outcome = self._computing.read(batch, rows)
        except ForwardEnded:
            pass
        if not shard.was_called or (shard.outcome is None) is self.graph.is_last:
            raise LossError("the loss did not call the model, expected one call", fix=FIX)
        shard.position = self._position()
        to = {
            stage: passed({name: shard.given[name] for name in names}, shard.position)
            for stage, names in self.route.forward_to.items()
        }
        return ForwardResults(to, self._left(), shard.outcome)

    def backward(
        self,
        number: int,
        receive: Callable[[], Sequence[BackwardMessage]],
        *,
        is_first_part: bool = False,
    ) -> BackwardResults:
        """Compute a shard's backward pass, and forget the shard.

        Args:
            receive: returns the messages of later stages. Blocks.
            is_first_part: whether gradients of the stage's parameters may be left for ``complete``.
        """
        shard = self._shards.pop(number)
        returned = receive()
        self._set_position(shard, returned)
        roots: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        if shard.outcome is not None:
            weight = shard.outcome.multiplier
            roots.append((shard.outcome.loss, None))
        else:
            weight = returned[0].weight
            later = {name: value for each in returned for name, value in each.values.items()}
            roots += [*roots_of(shard.given, later), *shard.entered.roots(later)]
            for name, gradient in returned[0].parameters.items():
                roots.append((self._computing.trained[name], gradient))
        second = None
        if roots and weight > 0:
            second = self._derived([Root(*root) for root in roots], is_first_part=is_first_part)
        own, of_others = self._taken()
        position = self._position()
        to = {
            stage: BackwardMessage(
                {name: shard.entered.gradients(name) for name in names},
                of_others if stage == self.graph.index - 1 else {},
                weight,
                position,
            )
            for stage, names in self.route.back_to.items()
        }
        return BackwardResults(to, own, weight, second)

    def complete(self, back: BackwardResults) -> BackwardResults:
        """Compute the second part of a backward pass; return the results of both parts."""
        if back.second is None:
            return back
        back.second.derive()
        own, _ = self._taken()
        return back._replace(gradients={**back.gradients, **own}, second=None)

    def _derived(self, roots: Sequence[Root], *, is_first_part: bool) -> SecondPart | None:
        if not is_first_part:
            derive(roots)
            return None
        trained = self._computing.trained
        return derive_first(roots, [trained[name] for name in self.route.owned if name in trained])

    def _taken(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Take the gradients of parameters: the stage's own, and those of other stages."""
        own: dict[str, torch.Tensor] = {}
        of_others: dict[str, torch.Tensor] = {}
        for name, parameter in self._computing.trained.items():
            if parameter.grad is not None:
                gradients = own if name in self.route.owned else of_others
                gradients[name], parameter.grad = parameter.grad, None
        return own, of_others

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def _left(self) -> dict[str, torch.Tensor]:
        if not self.graph.buffers:
            return {}
        found = dict(self._computing.model.named_buffers())
        return {name: found[name].detach().clone() for name in self.graph.buffers}

    def _position(self) -> torch.Tensor | None:
        return self._stream.generator.get_state() if self._stream.drawn else None

    def _set_position(self, shard: _OpenShard, returned: Sequence[BackwardMessage]) -> None:
        """Set the random stream for a backward pass that draws, as in the unsplit model."""
        position = returned[0].position if returned else shard.position
        self._stream.reseed(shard.seed)
        if position is not None:
            self._stream.generator.set_state(position)


@contextmanager
def _forward_is(model: Any, function: Callable[..., Any]) -> Iterator[None]:
    """Replace the model's forward by a function inside the block; hooks stay."""
    own = vars(model).get("forward")
    model.forward = function
    try:
        yield
    finally:
        if own is None:
            del model.forward
        else:
            model.forward = own


class _OpenShard:
    """A shard in progress."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.entered = EnteredValues()
        self.given: dict[str, Any] = {}
        self.outcome: LossResult | None = None
        self.position: torch.Tensor | None = None
        self.was_called = False
