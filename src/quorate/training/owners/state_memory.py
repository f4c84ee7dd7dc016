"""Memory for an optimizer's state: planes of shared memory, each as large as all parameters.

An entry per element of an optimizer's tensor, such as a moment, lies in a plane at the offset of
the tensor in the parameters. The kernel allocates a page when a process first writes the page, for
that process.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from quorate.machine.shared_memory import Segment
from quorate.replica.flat import Layout
from quorate.training.optimizing.known_optimizers import is_by_element

PLANES = 4  # torch's optimizers keep at most three entries per element

Told = dict[str, Any]  # by entry: its place, or a small tensor or a number


class InPlane(NamedTuple):
    """An entry per element: a place in shared memory, which is not sent."""

    plane: int


class StateMemory:
    """Planes for the state of an optimizer over flat vectors.

    Args:
        layout: the layout of the parameters.
    """

    def __init__(self, layout: Layout) -> None:
        nbytes = -(-max(1, layout.nbytes) // 4096) * 4096
        segment = Segment(PLANES * nbytes)
        self._planes = [layout.over(segment, plane * nbytes) for plane in range(PLANES)]

    def told(self, entries: dict[str, Any], tensor: torch.Tensor, first: str) -> Told:
        """Return the message about the entries of a tensor; values per element become views here.

        Args:
            first: name of the first parameter in the tensor.
        """
        by_element = {k: value for k, value in entries.items() if is_by_element(k, value)}
        found = {k: self._plane_of(value, first) for k, value in by_element.items()}
        planes = {entry: plane for entry, plane in found.items() if plane is not None}
        for entry in [entry for entry in by_element if entry not in planes]:
            planes[entry] = next(plane for plane in range(PLANES) if plane not in planes.values())
            entries[entry] = self._view(planes[entry], first, tensor)
            entries[entry].copy_(by_element[entry])
        return {k: InPlane(planes[k]) if k in planes else value for k, value in entries.items()}

    def entries(self, told: Told, tensor: torch.Tensor, first: str) -> dict[str, Any]:
        """Return the entries described by a message of ``told``."""
        return {
            entry: self._view(value.plane, first, tensor) if isinstance(value, InPlane) else value
            for entry, value in told.items()
        }

    def _view(self, plane: int, first: str, like: torch.Tensor) -> torch.Tensor:
        flat = self._planes[plane]
        section = flat.layout.sections[first]
        return flat.vectors[section.vector][section.start : section.start + like.numel()]

    def _plane_of(self, value: torch.Tensor, first: str) -> int | None:
        """Return the plane that holds an entry at the entry's place; None if there is none."""
        for plane in range(PLANES):
            if self._view(plane, first, value).data_ptr() == value.data_ptr():
                return plane
        return None
