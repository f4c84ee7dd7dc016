"""Model changes: what user code changed between two updates, and where no vector has it.

Values of trained parameters lie in the flat vectors, and those of buffers go with every shard. What
is in neither goes to workers as an amendment: which parameters want no gradient any more, numbers
that modules have as attributes, and that frozen parameters have other values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from quorate.replica.beside.shared import Simple
from quorate.replica.beside.values import NO_VALUES, Values

__all__ = ["ModelChanges", "ModelChangesReceiver", "Simple", "plain"]


@dataclass(frozen=True)
class ModelChanges:
    """All that was changed since the script made the model."""

    number: int = 0  # counts changes
    switched_off: frozenset[str] = frozenset()  # trained parameters that want no gradient now
    attributes: Mapping[str, Mapping[str, Simple]] = field(default_factory=dict)  # by module
    frozen: int = 0  # counts changes of frozen parameters' values
    shared: Values = field(default=NO_VALUES, compare=False)  # has a number of its own

    def to_json(self) -> dict[str, Any]:
        """Return what ``from_json`` takes, elsewhere or at a resume: all but ``shared``."""
        return {
            "number": self.number,
            "switched_off": sorted(self.switched_off),
            "attributes": {module: dict(named) for module, named in self.attributes.items()},
            "frozen": self.frozen,
        }

    @staticmethod
    def from_json(sent: Mapping[str, Any]) -> ModelChanges:
        """Return model_changes from what ``to_json`` gave."""
        return ModelChanges(
            sent["number"], frozenset(sent["switched_off"]), sent["attributes"], sent["frozen"]
        )

    def apply(self, model: torch.nn.Module, trained: Mapping[str, torch.Tensor]) -> None:
        """Change a model in the same way, but for values of parameters.

        Args:
            trained: its parameters that lie in the flat vectors, by name.
        """
        for name, parameter in trained.items():
            if parameter.requires_grad is (name in self.switched_off):
                parameter.requires_grad_(name not in self.switched_off)
        modules = dict(model.named_modules()) if self.attributes else {}
        for name, attributes in self.attributes.items():
            # Under a name of the coordinator's model, which this is a copy of.
            for attribute, value in attributes.items():
                setattr(modules[name], attribute, value)


class ModelChangesReceiver:
    """Keeps a replica's model like the coordinator's. For the replica's own thread.

    Args:
        model: the replica's.
        trained: names of the parameters that lie in the flat vectors.
        frozen: where the coordinator has the values of the others, by name.
        changed: told when the model is another one to what was recorded of it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        trained: Collection[str],
        frozen: Callable[[], Mapping[str, torch.Tensor]],
        changed: Callable[[], None],
    ) -> None:
        self._model = model
        self._own = dict(model.named_parameters())
        self._trained = {name: self._own[name] for name in trained}
        self._frozen = frozen
        self._changed = changed
        self._known = ModelChanges()

    def take(self, model_changes: ModelChanges) -> None:
        """Change the model as the coordinator's was, unless it is already."""
        known, self._known = self._known, model_changes
        if model_changes.number == known.number:
            return
        if model_changes.frozen != known.frozen:
            for name, value in self._frozen().items():
                own = self._own[name]
                if own.data_ptr() != value.data_ptr():  # a copy, on another device
                    own.data.copy_(value)
        same = (model_changes.switched_off, model_changes.attributes) == (
            known.switched_off,
            known.attributes,
        )
        if not same:
            model_changes.apply(self._model, self._trained)
            self._changed()


def plain(value: Any) -> Simple:
    """Return a number of a type that JSON has: NumPy's float64 is a float, and one of its own."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return None
