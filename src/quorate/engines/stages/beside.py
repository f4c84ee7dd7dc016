"""Values of ``Shared``, as they are sent to processes of stages: by value, when they have changed.

Processes are forks, and have what the parent has mapped by then. What the coordinator makes later
lies in memory that only the parent has, so it is sent; each process has a copy of its own, laid
out as everywhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quorate.replica.beside.values import Values


def packed(values: Values) -> tuple[dict[str, Any], Mapping[str, torch.Tensor]]:
    """Return what a link can carry, and ``unpacked`` takes."""
    return values.to_json(stored=True), values.tensors.views


@torch.no_grad()
def unpacked(sent: tuple[dict[str, Any], Mapping[str, torch.Tensor]]) -> Values:
    """Return the values that were sent."""
    described, tensors = sent
    values = Values().from_json(described)
    for name, view in values.tensors.views.items():
        view.copy_(tensors[name])
    return values
