"""The boundary between two stages: values go over it without their graph, gradients come back.

A value is any nest of tensors and whatever else. On the one side its tensors are kept, as roots of
the stage's backward pass; on the other they enter a graph of their own. What comes from later
stages is put into a tensor's gradient before what this stage adds: ``torch.autograd.backward``
begins with the gradients that it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from quorate.replica.nested import mapped, tensors

Gradients = list[torch.Tensor | None]  # of the tensors of a value, in their order


class Passed(NamedTuple):
    """What goes from stage to stage with a shard."""

    values: Mapping[str, Any]  # detached
    wanted: Mapping[str, Sequence[bool]]  # of each one's tensors, whether a gradient is
    position: torch.Tensor | None  # of the random stream; None: nothing was drawn


class Returned(NamedTuple):
    """What comes back."""

    values: Mapping[str, Gradients]
    parameters: Mapping[str, torch.Tensor]  # gradients of such as earlier stages have
    weight: float  # the shard's; 0: there is no gradient at all
    position: torch.Tensor | None


def passed(values: Mapping[str, Any], position: torch.Tensor | None) -> Passed:
    """Return values as they go to another stage."""
    return Passed(
        {name: mapped(value, torch.Tensor.detach) for name, value in values.items()},
        {name: [t.requires_grad for t in tensors(value)] for name, value in values.items()},
        position,
    )


class Entered:
    """Values of earlier stages that entered a graph, and their gradients after backward."""

    def __init__(self) -> None:
        self._held: dict[str, list[_Held]] = {}

    def enter(self, arrived: Passed) -> dict[str, Any]:
        """Return values with a graph that begins here."""
        values = {}
        for name, value in arrived.values.items():
            wanted = iter(arrived.wanted[name])
            held = self._held[name] = []

            def begin(
                tensor: torch.Tensor, wanted: Any = wanted, held: list[_Held] = held
            ) -> torch.Tensor:
                each = _Held(tensor)
                held.append(each)
                if next(wanted) and torch.is_grad_enabled():
                    handle = torch.empty((), requires_grad=True)
                    entered: torch.Tensor = _Enter.apply(handle, each)  # type: ignore[no-untyped-call]
                    each.entered = entered
                    return entered
                return tensor

            values[name] = mapped(value, begin)
        return values

    def roots(self, later: Mapping[str, Gradients]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the tensors that later stages took too, with the gradients from there."""
        return [
            (held.entered, gradient)
            for name, gradients in later.items()
            for held, gradient in zip(self._held.get(name, ()), gradients, strict=False)
            if held.entered is not None and gradient is not None
        ]

    def gradients(self, name: str) -> Gradients:
        """Return the gradients of a value, those from later stages included."""
        return [held.gradient for held in self._held[name]]


def roots_of(
    values: Mapping[str, Any], later: Mapping[str, Gradients]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the tensors that this stage made and gave, with their gradients from later ones."""
    return [
        (tensor, gradient)
        for name, value in values.items()
        for tensor, gradient in zip(tensors(value), later.get(name, ()), strict=False)
        if tensor.requires_grad and gradient is not None
    ]


class _Held:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor  # until it entered
        self.entered: torch.Tensor | None = None
        self.gradient: torch.Tensor | None = None


class _Enter(torch.autograd.Function):
    """Where a value enters a graph. No leaf, which a module could not write in place."""

    @staticmethod
    def forward(ctx: Any, handle: torch.Tensor, held: _Held) -> torch.Tensor:  # noqa: ARG004
        ctx.held = held
        tensor, held.tensor = held.tensor, None
        assert tensor is not None
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        (ctx.held.gradient,) = gradients
        return None, None
