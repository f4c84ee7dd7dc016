"""Model changes by user code between two updates, as far as no flat vector contains the change.

Flat vectors contain the values of trained parameters, and buffers are sent with every shard. All
further changes are sent to workers as ``ModelChanges``: parameters without a gradient from now on,
numbers set as attributes of modules, and new values of frozen parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from quorate.replica.beside.shared import Simple
from quorate.replica.beside.values import NO_VALUES, SharedValues
from quorate.replica.replica import Replica

__all__ = ["ModelChanges", "ModelChangesReceiver", "Simple", "plain"]


@dataclass(frozen=True)
class ModelChanges:
    """All changes since the script created the model.

    Attributes:
        number: counts changes.
        switched_off: names of trained parameters that require no gradient now.
        attributes: changed attributes, by the name of the module.
        frozen: counts changes of frozen parameters' values.
        shared: the values of all ``Shared``, with a count of their own.
    """

    number: int = 0
    switched_off: frozenset[str] = frozenset()
    attributes: Mapping[str, Mapping[str, Simple]] = field(default_factory=dict)
    frozen: int = 0
    shared: SharedValues = field(default=NO_VALUES, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Return the changes without ``shared``, for messages and checkpoints."""
        return {
            "number": self.number,
            "switched_off": sorted(self.switched_off),
            "attributes": {module: dict(named) for module, named in self.attributes.items()},
            "frozen": self.frozen,
        }

    @staticmethod
    def from_json(sent: Mapping[str, Any]) -> ModelChanges:
        """Return model changes from the result of ``to_json``."""
        return ModelChanges(
            sent["number"], frozenset(sent["switched_off"]), sent["attributes"], sent["frozen"]
        )

    def apply(self, model: torch.nn.Module, trained: Mapping[str, torch.Tensor]) -> None:
        """Make the changes in a model, except for values of parameters.

        Args:
            trained: the model's parameters in flat vectors, by name.
        """
        for name, parameter in trained.items():
            if parameter.requires_grad is (name in self.switched_off):
                parameter.requires_grad_(name not in self.switched_off)
        modules = dict(model.named_modules()) if self.attributes else {}
        for name, attributes in self.attributes.items():
            # The model is a copy of the coordinator's model, with equal names.
            for attribute, value in attributes.items():
                setattr(modules[name], attribute, value)


class ModelChangesReceiver:
    """Makes the changes of the coordinator's model in a replica. For the replica's own thread.

    Args:
        replica: the replica with the model to change.
        frozen: returns the coordinator's values of frozen parameters, by name.
    """

    def __init__(self, replica: Replica, frozen: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self._replica = replica
        self._parameters = dict(replica.model.named_parameters())
        self._trained = {name: self._parameters[name] for name in replica.trained}
        self._frozen = frozen
        self._known = ModelChanges()

    def take(self, changes: ModelChanges) -> None:
        """Make changes that the replica does not have yet."""
        known, self._known = self._known, changes
        if changes.number == known.number:
            return
        if changes.frozen != known.frozen:
            for name, value in self._frozen().items():
                own = self._parameters[name]
                if own.data_ptr() != value.data_ptr():  # a copy, on another device
                    own.data.copy_(value)
        if (changes.switched_off, changes.attributes) != (known.switched_off, known.attributes):
            changes.apply(self._replica.model, self._trained)
            self._replica.changed()


def plain(value: Any) -> Simple:
    """Return a value as a plain type of JSON: a float for NumPy's float64 and for subclasses."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return None
