"""How a replica over several devices is made: in stages, or as the script has placed its parts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from quorate.machine.devices import Group
from quorate.replica.compute import Compute
from quorate.replica.pipeline.split import Split, refused, require_devices, stages_of
from quorate.replica.replica import Replica
from quorate.replica.spread import Spread
from quorate.transports.engines import PROCESSES, TOWERS
from quorate.transports.stages.pipelined import Pipelined

__all__ = ["Replica", "Split", "Spread", "made", "parts_of"]


def parts_of(
    model: torch.nn.Module,
    groups: Sequence[Group],
    compute: Compute,
    *,
    engine: str,
    threads: int,
) -> Spread | Split | None:
    """Return how a model lies on the devices of each replica; None: each has one.

    Args:
        threads: intra-op threads of a worker.

    Raises:
        SettingError: it cannot lie so.
    """
    names = compute.split
    if names is None:
        if not any(len(group) > 1 for group in groups):
            return None
        if any(device.type != "cpu" for group in groups for device in group):
            return Spread(model, groups)
        stages = stages_of(groups, compute.pipeline)
    else:
        require_devices(names, groups)
        stages = len(names) + 1
    if engine not in (PROCESSES, TOWERS):
        raise refused(names, f"the engine is {engine}", "take engine='processes', or leave it out")
    if engine == TOWERS and len(groups) > 1:
        raise refused(names, "several workers are towers: take engine='processes'")
    if threads > 1:  # OpenMP's threads do not outlive a fork
        raise refused(names, f"a worker has {threads} threads: with stages it has one for each")
    if sys.platform != "linux":
        raise refused(names, "stages are processes, which need Linux")
    return Split(names, stages, compute.pipeline)


def made(*args: Any, spread: Spread | Split | None, **options: Any) -> Replica:
    """Return a replica; arguments as for ``Replica``."""
    if isinstance(spread, Split):
        return Pipelined(*args, split=spread, **options)
    return Replica(*args, spread=spread, **options)
