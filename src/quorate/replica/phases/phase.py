"""A phase: the updates of a training that have one loss, and train one of several models."""

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
    """A phase of a training of several models. ``(name, loss)`` stands for one.

    Args:
        name: of the phase; its metrics are called name/loss, name/accuracy, ...
        loss: as a ``Trainer`` takes it, with ``at`` or without; no ``Gather``. The model is all of
            it.
        trains: the parts of the model whose parameters its updates change: of a dict of models
            their names, of a module the paths of modules in it. Default: the part of its name.
        new_batch: whether it takes the next batch. Default: if it has had the one of the update
            before already, so that d, d, g takes two: one for the first d, and one for d and g.
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
        """The loss as a function of model, batch and at, whether it asks for that or not."""
        loss = self.loss
        if asks_for_at(loss):
            return loss

        def plain(model: torch.nn.Module, batch: Any, _at: At) -> Any:
            return loss(model, batch)

        return plain

    @property
    def parts(self) -> tuple[str, ...]:
        """What ``trains`` is, put together."""
        assert isinstance(self.trains, tuple)
        return self.trains

    def covers(self, parameter: str) -> bool:
        """Return whether a parameter, by its name in the model, is one that it trains."""
        return any(parameter == part or parameter.startswith(f"{part}.") for part in self.parts)
