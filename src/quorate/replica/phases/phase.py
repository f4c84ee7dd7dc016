"""The Phase class: updates with a common loss, for a part of several models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quorate.errors import SettingError
from quorate.replica.beside.asks import asks_for_at
from quorate.settings import function

if TYPE_CHECKING:
    import torch

    from quorate.replica.beside.at import At
    from quorate.replica.loss import Loss


@dataclass(frozen=True)
class Phase:
    """One phase in the training of several models. A tuple ``(name, loss)`` is a phase too.

    Args:
        name: name of the phase, and prefix of its metrics: "d" gives "d/loss" and "d/accuracy".
        loss: a loss function as for ``Trainer``, with or without ``at``, but not a ``Gather``. The
            function receives the whole model.
        trains: the parts of the model whose parameters the phase updates: names of models in a dict
            of models, or paths of modules in a module. Default: the part with the name of the
            phase.
        new_batch: whether the phase takes the next batch. Default: True if the phase has already
            had the current batch. So the phases d, d, g take two batches: one for the first d, one
            for the second d and g.
    """

    name: str
    loss: Loss
    trains: str | Sequence[str] | None = None
    new_batch: bool | None = None

    def __post_init__(self) -> None:
        name = self.name
        if not isinstance(name, str) or not name or not name.isprintable() or set(name) & set("/."):
            expected = "a printable text without . and /, for each phase"
            raise SettingError("loss", name, expected, 'for example {"d": d_loss, "g": g_loss}')
        if asks_for_at(self.loss):
            function(f"loss {name!r}", self.loss, "of a model, a batch and at", 3)
        else:
            function(f"loss {name!r}", self.loss, "of a model and a batch", 2)
        trains = self.trains
        parts = (name,) if trains is None else (trains,) if isinstance(trains, str) else (*trains,)
        if not parts or not all(isinstance(part, str) and part for part in parts):
            expected = "names of parts of the model"
            raise SettingError(f"trains of {name!r}", trains, expected, "leave it out for its own")
        object.__setattr__(self, "trains", parts)

    @cached_property
    def with_at(self) -> Loss:
        """The loss as a function of model, batch and at, also if the loss takes no ``at``."""
        loss = self.loss
        if asks_for_at(loss):
            return loss

        def plain(model: torch.nn.Module, batch: Any, _at: At) -> Any:
            return loss(model, batch)

        return plain

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the model in ``trains``, as a tuple."""
        assert isinstance(self.trains, tuple)
        return self.trains

    def covered(self, model: torch.nn.Module) -> list[str]:
        """Return the names of the parameters of the phase's parts, in the order of the model.

        A tied parameter belongs to each of its parts, and has one name in the result: its first.
        """
        every = model.named_parameters(remove_duplicate=False)
        own = {id(parameter) for name, parameter in every if self._covers(name)}
        return [name for name, parameter in model.named_parameters() if id(parameter) in own]

    def _covers(self, name: str) -> bool:
        return any(name == part or name.startswith(f"{part}.") for part in self.parts)
