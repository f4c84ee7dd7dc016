"""Entries of an optimizer's state of a tensor, as sent to a process with the same shared memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from quorate.training.optimizing.known_optimizers import COUNTERS
from quorate.training.parts.state_memory import StateMemory


class InPlane(NamedTuple):
    """An entry per element: a place in shared memory, which is not sent."""

    plane: int


Entries = dict[str, Any]  # as in an optimizer's state
Told = dict[str, Any]  # by entry: its place, or a small tensor or a number


def told(entries: Entries, memory: StateMemory, tensor: torch.Tensor, first: str) -> Told:
    """Return the message about the entries of a tensor, after moving entries per element to memory.

    Args:
        entries: the entries; values per element become views of the memory.
        first: name of the first parameter in the tensor.
    """
    said: Told = {}
    away = []
    for entry, value in entries.items():
        if not isinstance(value, torch.Tensor) or entry in COUNTERS or value.shape != tensor.shape:
            said[entry] = value
        elif (plane := memory.has(value, first)) is not None:
            said[entry] = InPlane(plane)
        else:
            said[entry] = None  # keeps the order of entries
            away.append(entry)
    for entry in away:
        used = [each.plane for each in said.values() if isinstance(each, InPlane)]
        plane = memory.put(entries[entry], first, used)
        said[entry], entries[entry] = InPlane(plane), memory.view(plane, first, tensor)
    return said


def taken(said: Told, memory: StateMemory, tensor: torch.Tensor, first: str) -> Entries:
    """Return the entries described by a message of ``told``."""
    return {
        entry: memory.view(value.plane, first, tensor) if isinstance(value, InPlane) else value
        for entry, value in said.items()
    }
