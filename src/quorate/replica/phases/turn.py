"""The present phase of a replica: the loss, and the parameters to train."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NoReturn

import torch

from quorate.errors import LossError
from quorate.replica.loss import Loss
from quorate.replica.phases.losses import PhaseLosses

Parameters = Mapping[str, torch.nn.Parameter]
_NOTHING = nullcontext()
_NONE = frozenset[str]()


class CurrentPhase:
    """The phase that a replica computes; without phases, and between phases, the whole loss.

    Args:
        loss: the user's loss function, or the losses of phases.
        model: the model of the replica.
        trainable: its parameters in the flat vector.
        wrap: returns the function to call instead of each loss function. Default: the function
            itself.
    """

    def __init__(
        self,
        loss: Loss,
        model: torch.nn.Module,
        trainable: Parameters,
        wrap: Callable[[Loss], Loss] | None = None,
    ) -> None:
        self._phases = loss.by_name if isinstance(loss, PhaseLosses) else {}
        functions = {None: loss} | {name: phase.with_at for name, phase in self._phases.items()}
        self._losses = {
            name: function if wrap is None else wrap(function)
            for name, function in functions.items()
        }
        self._ours: dict[str | None, Parameters] = {None: trainable} | {
            name: {each: trainable[each] for each in phase.covered(model) if each in trainable}
            for name, phase in self._phases.items()
        }
        self.phase: str | None = None  # the present phase

    @property
    def has_phases(self) -> bool:
        """True if there are phases."""
        return bool(self._phases)

    @property
    def trained(self) -> Parameters:
        """The parameters that have a gradient in the present phase."""
        return self._ours[self.phase]

    def missing(self, gradients: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Return the names of trained parameters without a gradient."""
        if self.phase is None and len(gradients) == len(self.trained):
            return _NONE
        return frozenset(self.trained.keys() - gradients.keys())

    def loss(self, phase: str | None) -> Loss:
        """Select a phase, or None for the whole loss, and return its loss function."""
        self.phase = phase
        return self._losses[phase]

    def alone(self) -> AbstractContextManager[None]:
        """Return a context in which only parameters of the present phase require a gradient.

        No time is spent on further gradients.
        """
        return _NOTHING if self.phase is None else self._alone()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        ours = self.trained
        others = [p for name, p in self._ours[None].items() if name not in ours and p.requires_grad]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    def refuse(self) -> NoReturn:
        """Refuse a loss that depends on no trained parameter.

        Raises:
            LossError: always.
        """
        of = "" if self.phase is None else f" of phase {self.phase!r}"
        raise LossError(
            f"loss{of}",
            got="a loss that has no gradient with respect to the model that the function received",
            expected="a loss computed with the `model` argument",
            fix="do not use a model from outside of the loss function",
        )
