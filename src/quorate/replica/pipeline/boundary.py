"""The boundary between two stages: values cross without their graph, gradients come back.

A value is any nest of tensors and further objects. On the sending side its tensors are kept as
roots of the stage's backward pass; on the receiving side they enter a new graph. Gradients from
later stages are added before this stage's own: ``torch.autograd.backward`` begins with the
gradients in its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from quorate.replica.nested import mapped, tensors

Gradients = list[torch.Tensor | None]  # of the tensors of a value, in order


class ForwardMessage(NamedTuple):
    """The message from stage to stage with a shard's forward pass."""

    values: Mapping[str, Any]  # detached
    wanted: Mapping[str, Sequence[bool]]  # whether a gradient is wanted, for each tensor of a value
    position: torch.Tensor | None  # of the random stream; None: no number was drawn


class BackwardMessage(NamedTuple):
    """The message from stage to stage with a shard's backward pass."""

    values: Mapping[str, Gradients]
    parameters: Mapping[str, torch.Tensor]  # gradients of parameters owned by earlier stages
    weight: float  # of the shard; 0: there is no gradient at all
    position: torch.Tensor | None


def passed(values: Mapping[str, Any], position: torch.Tensor | None) -> ForwardMessage:
    """Return values in the form for another stage."""
    return ForwardMessage(
        {name: mapped(value, torch.Tensor.detach) for name, value in values.items()},
        {name: [t.requires_grad for t in tensors(value)] for name, value in values.items()},
        position,
    )


class EnteredValues:
    """Values of earlier stages that entered a graph, with their gradients after backward."""

    def __init__(self) -> None:
        self._held: dict[str, list[_BoundaryTensor]] = {}

    def enter(self, arrived: ForwardMessage) -> dict[str, Any]:
        """Return values with a graph that begins here."""
        values = {}
        for name, value in arrived.values.items():
            wanted = iter(arrived.wanted[name])
            held = self._held[name] = []

            def begin(
                tensor: torch.Tensor, wanted: Any = wanted, held: list[_BoundaryTensor] = held
            ) -> torch.Tensor:
                each = _BoundaryTensor(tensor)
                held.append(each)
                if next(wanted) and torch.is_grad_enabled():
                    handle = torch.empty((), requires_grad=True)
                    entered: torch.Tensor = _EnterGraph.apply(handle, each)  # type: ignore[no-untyped-call]
                    each.entered = entered
                    return entered
                return tensor

            values[name] = mapped(value, begin)
        return values

    def roots(self, later: Mapping[str, Gradients]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the entered tensors that later stages take too, with the gradients from there."""
        return [
            (held.entered, gradient)
            for name, gradients in later.items()
            for held, gradient in zip(self._held.get(name, ()), gradients, strict=False)
            if held.entered is not None and gradient is not None
        ]

    def gradients(self, name: str) -> Gradients:
        """Return the gradients of a value, including those from later stages."""
        return [held.gradient for held in self._held[name]]


def roots_of(
    values: Mapping[str, Any], later: Mapping[str, Gradients]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the tensors made and given by this stage, with their gradients from later stages."""
    return [
        (tensor, gradient)
        for name, value in values.items()
        for tensor, gradient in zip(tensors(value), later.get(name, ()), strict=False)
        if tensor.requires_grad and gradient is not None
    ]


class _BoundaryTensor:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor  # until the tensor has entered
        self.entered: torch.Tensor | None = None
        self.gradient: torch.Tensor | None = None


class _EnterGraph(torch.autograd.Function):
    """The node where a value enters a graph: no leaf, which a module could not write in place."""

    @staticmethod
    def forward(ctx: Any, handle: torch.Tensor, held: _BoundaryTensor) -> torch.Tensor:  # noqa: ARG004
        ctx.held = held
        tensor, held.tensor = held.tensor, None
        assert tensor is not None
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        (ctx.held.gradient,) = gradients
        return None, None
