"""The values of all ``Shared`` objects at some time, read by the shards dealt at the same time.

A set of values never changes: values set by user code afterwards belong to the next set. So a slow
worker reads the values of its shard, and no thread waits for readers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from quorate.machine.shared_memory import Segment
from quorate.replica.beside.shared import SIMPLE, Simple, are_any, everyone, live, tensors_of
from quorate.replica.digest import same_bits
from quorate.replica.flat import Flat, Layout

Plain = Mapping[str, Mapping[str, Simple]]  # by name of the ``Shared`` and key


def _nothing() -> Flat:
    return Layout(()).new(torch.device("cpu"))


@dataclass(frozen=True, eq=False)
class SharedValues:
    """The content of all ``Shared`` objects.

    Args:
        number: counter of changes.
        plain: numbers, texts, None.
        stored: counter of changes of tensors.
        tensors: tensors on the CPU, by ``name.key``, for a module by ``name.key.parameter``; in
            memory that other processes can map, if made by the coordinator.
    """

    number: int = 0
    plain: Plain = field(default_factory=dict)
    stored: int = 0
    tensors: Flat = field(default_factory=_nothing)

    def to_json(self, *, stored: bool) -> dict[str, Any]:
        """Return the message for ``from_json`` in another process.

        Args:
            stored: whether to include the layout of the tensors.
        """
        return {
            "number": self.number,
            "plain": self.plain,
            "stored": self.stored,
            "tensors": self.tensors.layout.described() if stored else None,
        }

    def from_json(self, sent: Mapping[str, Any]) -> SharedValues:
        """Return the values of a message sent after these values, with new memory for tensors."""
        if sent["tensors"] is None:
            return SharedValues(sent["number"], sent["plain"], sent["stored"], self.tensors)
        tensors = Layout.of(sent["tensors"]).new(torch.device("cpu"))
        return SharedValues(sent["number"], sent["plain"], sent["stored"], tensors)

    def mapped(self, sent: Mapping[str, Any], fd: int) -> SharedValues:
        """Return the values of a message, and take over the descriptor of their tensors."""
        tensors = Layout.of(sent["tensors"]).over(Segment(os.fstat(fd).st_size, fd))
        return SharedValues(sent["number"], sent["plain"], sent["stored"], tensors)


NO_VALUES = SharedValues()


class NewestValues:
    """The coordinator's record of the values set by user code, for the next shards."""

    def __init__(self) -> None:
        self.values = NO_VALUES
        # Copies of tensors on accelerators, to be compared on the device: by ``name.key``.
        self._copies: dict[str, torch.Tensor] = {}

    def look(self) -> SharedValues:
        """Return the present values; the same object if nothing was changed.

        Makes a pass over the tensors, because a write through ``.data`` leaves no trace. The host
        waits once per accelerator for the comparison of its tensors.

        Raises:
            UserError: there is no memory for the values.
        """
        if not are_any() and not self.values.number:
            return self.values
        return self._look()

    @torch.no_grad()
    def _look(self) -> SharedValues:
        known = self.values
        plain, tensors = _looked_at()
        before = {**known.tensors.views, **self._copies}
        pairs = zip(tensors.values(), before.values(), strict=False)
        is_stored = [*tensors] == [*before] and all(same_bits(pairs))
        if is_stored and repr(plain) == repr(known.plain):  # tells 0.0 from -0.0; nan equals nan
            return known
        stored = known.tensors
        if not is_stored:
            stored = Layout(tensors.items()).shared()
            for name, tensor in tensors.items():
                stored.views[name].copy_(tensor)
            on_accelerators = (each for each in tensors.items() if each[1].device.type != "cpu")
            self._copies = {name: tensor.detach().clone() for name, tensor in on_accelerators}
        self.values = SharedValues(known.number + 1, plain, known.stored + (not is_stored), stored)
        return self.values


def as_set() -> tuple[Plain, dict[str, torch.Tensor]]:
    """Return the values set in this process, with the tensors themselves and no copies."""
    return _looked_at()


def _looked_at() -> tuple[Plain, dict[str, torch.Tensor]]:
    plain: dict[str, dict[str, Simple]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, shared in everyone().items():
        plain[name] = {}
        for key, value in live(shared).items():
            if isinstance(value, SIMPLE):
                plain[name][key] = value
            else:
                tensors |= tensors_of(f"{name}.{key}", value)
    return plain, tensors
