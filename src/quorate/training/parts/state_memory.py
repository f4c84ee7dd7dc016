"""Where an optimizer's state lies: planes of shared memory, each as large as all parameters.

An entry by element of one of the optimizer's tensors, a moment say, lies in some plane where the
tensor lies in the parameters. Pages are taken from the machine when they are first written, by the
process that writes them.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from quorate.machine.shared_memory import Segment
from quorate.replica.flat import Layout

PLANES = 4  # no optimizer of torch's keeps more than three entries of an element


class StateMemory:
    """Planes for the state of an optimizer over flat vectors.

    Args:
        layout: of the parameters.
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
            first: the first parameter that the optimizer's tensor holds.
            like: of the size and the dtype of the entry, which is no wider than the tensor's.
        """
        key = (plane, first, like.numel(), like.dtype)
        if key not in self._views:
            section = self._sections[first]
            start = self._starts[section.vector] + section.start * self._sizes[section.vector]
            start += plane * self._plane_bytes
            self._views[key] = self._segment.tensor(like.dtype, like.numel(), start)
        return self._views[key]

    def has(self, value: torch.Tensor, first: str) -> int | None:
        """Return the plane that an entry lies in, at its place; None: it lies elsewhere."""
        for plane in range(PLANES):
            view = self._views.get((plane, first, value.numel(), value.dtype))
            if view is not None and view.data_ptr() == value.data_ptr():
                return plane
        return None

    def put(self, value: torch.Tensor, first: str, used: Collection[int]) -> int:
        """Copy an entry to its place in a plane that the tensor does not use, and return which."""
        plane = next(plane for plane in range(PLANES) if plane not in used)
        self.view(plane, first, value).copy_(value)
        return plane
