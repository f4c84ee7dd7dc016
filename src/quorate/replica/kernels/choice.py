"""The choice of the library for float32 products of a run's replicas, once for all workers.

The bits depend on the choice. So the default is torch's library; a choice is stored in the
checkpoints, and kept when a run goes on from one, on any processor, unless the user asks for a
library by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from quorate.replica.kernels import MEASURED, ONEDNN, TORCH, measured, products

if TYPE_CHECKING:
    from quorate.replica.computing import Computing


def chosen(
    asked: str | None,
    was: str | None,
    computing: Computing,
    model: torch.nn.Module,
    devices: Sequence[torch.device],
) -> tuple[str, list[str]]:
    """Return the chosen library, and lines for the user.

    Args:
        asked: TORCH, ONEDNN, MEASURED, or None: as in the checkpoint.
        was: the choice in the resumed checkpoint; None: the run begins.
        computing: the other settings of the computation.
        devices: devices of all workers.
    """
    if asked == MEASURED and was == TORCH:
        return TORCH, ["kernels: torch's, as when this run began; 'measured' is for new runs"]
    measures = asked == MEASURED and was is None
    named = asked if asked in (TORCH, ONEDNN) else was or TORCH
    if named == TORCH and not measures:
        return TORCH, []
    if (reason := _nothing_to_choose(computing, model, devices)) is not None:
        return TORCH, [f"kernels: torch's, because {reason}"]
    if not measures:
        return ONEDNN, []
    times = measured.how_much_faster()
    text = f"oneDNN multiplies float32 matrices {times:.1f} times as fast as torch on this CPU"
    if times < measured.CLEARLY:
        return TORCH, [f"kernels: torch's, because {text}, below {measured.CLEARLY:g} times"]
    return ONEDNN, [f"kernels: oneDNN's in linear layers, because {text}"]


def _nothing_to_choose(
    computing: Computing, model: torch.nn.Module, devices: Sequence[torch.device]
) -> str | None:
    """Return why all products are torch's, or None."""
    if computing.compile:
        return "the model is compiled"
    if computing.precision.working is not None or computing.precision.is_bf32:
        return f"precision is {computing.precision.name}"
    if all(device.type != "cpu" for device in devices):
        return "no worker is on a CPU"
    sides = [min(p.shape) for p in model.parameters() if p.dim() == 2]
    if max(sides, default=0) < products.LEAST_SIDE:
        return "no linear layer of the model is large enough"
    return products.lacking()
