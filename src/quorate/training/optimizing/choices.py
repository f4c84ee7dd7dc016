"""Choices of how updates are made: a single choice for a whole training, or a choice per phase."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from quorate.errors import SettingError
from quorate.replica.phases.losses import PhaseLosses
from quorate.settings import resolved
from quorate.training.optimizing.optimize import Optimize

__all__ = ["Optimize", "Optimizers", "optimize_of"]

if TYPE_CHECKING:
    from quorate.replica.loss import Loss
    from quorate.training.optimizing.assignments import Entry
    from quorate.training.optimizing.optimizer import OptimizerFactory

    Choice: TypeAlias = OptimizerFactory | list[Entry] | Optimize
    Optimizers: TypeAlias = Choice | Mapping[str, Choice]


def optimize_of(optimizer: Optimizers, loss: Loss) -> dict[str | None, Optimize]:
    """Return how updates are made, by phase, including the options of the command line.

    Args:
        optimizer: the argument of ``Trainer``. A value that is not a dict is used for each phase,
            and each phase makes its own optimizer from it.
        loss: the loss function, or the loss functions of the phases.

    Raises:
        SettingError: a value cannot work, or phases and optimizers have different names.
    """
    if not isinstance(loss, PhaseLosses):
        if isinstance(optimizer, Mapping):
            expected = "one function from parameters to a torch optimizer, as there is one loss"
            fix = "or pass a dict of losses by the same names"
            raise SettingError("optimizer", f"a dict of {_names(optimizer)}", expected, fix)
        return {None: resolved(Optimize, optimizer)}
    names = [*loss.by_name]
    if not isinstance(optimizer, Mapping):
        optimizer = dict.fromkeys(names, optimizer)
    if optimizer.keys() != loss.by_name.keys():
        expected = f"one for each phase: {_names(names)}"
        raise SettingError("optimizer", _names(optimizer), expected, "name them as the losses")
    return {name: resolved(Optimize, optimizer[name]) for name in names}


def _names(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names)) or "no names"
