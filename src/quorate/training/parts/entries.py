"""What an optimizer keeps of one tensor, as it is told to another process of the same memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from quorate.training.optimizing.known_optimizers import COUNTERS
from quorate.training.parts.state_memory import StateMemory


class InPlane(NamedTuple):
    """An entry by element, which is not sent."""

    plane: int


Entries = dict[str, Any]  # as an optimizer has them
Told = dict[str, Any]  # by entry: where it is, or a small tensor or number itself


def told(entries: Entries, memory: StateMemory, tensor: torch.Tensor, first: str) -> Told:
    """Return what is said of the entries of a tensor; those by element are in the memory then.

    Args:
        entries: whose values by element become views of the memory.
        first: the first parameter that the tensor holds.
    """
    said: Told = {}
    away = []
    for entry, value in entries.items():
        if not isinstance(value, torch.Tensor) or entry in COUNTERS or value.shape != tensor.shape:
            said[entry] = value
        elif (plane := memory.has(value, first)) is not None:
            said[entry] = InPlane(plane)
        else:
            said[entry] = None  # the order of entries is kept
            away.append(entry)
    for entry in away:
        used = [each.plane for each in said.values() if isinstance(each, InPlane)]
        plane = memory.put(entries[entry], first, used)
        said[entry], entries[entry] = InPlane(plane), memory.view(plane, first, tensor)
    return said


def taken(said: Told, memory: StateMemory, tensor: torch.Tensor, first: str) -> Entries:
    """Return the entries that ``told`` was given."""
    return {
        entry: memory.view(value.plane, first, tensor) if isinstance(value, InPlane) else value
        for entry, value in said.items()
    }
