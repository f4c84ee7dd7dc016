"""Memory for an optimizer's state: planes of shared memory, each as large as all parameters.

An entry per element of an optimizer's tensor, such as a moment, lies in a plane at the offset of
the tensor in the parameters. The kernel allocates a page when a process first writes the page, for
that process.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from quorate.machine.shared_memory import Segment
from quorate.replica.flat import Layout

PLANES = 4  # torch's optimizers keep at most three entries per element


class StateMemory:
    """Planes for the state of an optimizer over flat vectors.

    Args:
        layout: the layout of the parameters.
    """

    def __init__(self, layout: Layout) -> None:
        self._sections = layout.sections
        self._sizes = [dtype.itemsize for dtype in layout.dtypes]
        nbytes = [n * size for n, size in zip(layout.sizes, self._sizes, strict=True)]
        self._starts = [sum(nbytes[:vector]) for vector in range(len(nbytes))]
        self._plane_bytes = -(-max(1, sum(nbytes)) // 4096) * 4096
        self._segment = Segment(PLANES * self._plane_bytes)
        self._views: dict[tuple[int, str, int, torch.dtype], torch.Tensor] = {}

    def view(self, plane: int, first: str, like: torch.Tensor) -> torch.Tensor:
        """Return the place of an entry.

        Args:
            first: name of the first parameter in the optimizer's tensor.
            like: a tensor with the size and dtype of the entry; the dtype is at most as wide as the
                tensor's.
        """
        key = (plane, first, like.numel(), like.dtype)
        if key not in self._views:
            section = self._sections[first]
            start = self._starts[section.vector] + section.start * self._sizes[section.vector]
            start += plane * self._plane_bytes
            self._views[key] = self._segment.tensor(like.dtype, like.numel(), start)
        return self._views[key]

    def has(self, value: torch.Tensor, first: str) -> int | None:
        """Return the plane that holds an entry at the entry's place; None if there is none."""
        for plane in range(PLANES):
            view = self._views.get((plane, first, value.numel(), value.dtype))
            if view is not None and view.data_ptr() == value.data_ptr():
                return plane
        return None

    def put(self, value: torch.Tensor, first: str, used: Collection[int]) -> int:
        """Copy an entry to a plane not used by the tensor, and return the number of the plane."""
        plane = next(plane for plane in range(PLANES) if plane not in used)
        self.view(plane, first, value).copy_(value)
        return plane
