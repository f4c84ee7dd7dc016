"""New replicas: on one device, in stages, or spread over devices by the script."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from quorate.engines.selection import PROCESSES, TOWERS
from quorate.engines.stages.pipelined_replica import PipelinedReplica
from quorate.engines.stages.threaded_replica import ThreadedReplica
from quorate.machine.devices import Group
from quorate.replica.compute import Compute
from quorate.replica.flat import Flat
from quorate.replica.pipeline.split import Split, refused, require_devices, stages_of
from quorate.replica.replica import Replica
from quorate.replica.spread import DeviceSpread

__all__ = ["REPLICA_CLASSES", "DeviceSpread", "Replica", "Split", "new_replica", "parts_of"]

# By the type of the stages' devices; for further types ``ThreadedReplica``. On CPUs threads would
# wait for each other's Python. On GPUs kernels take the time, and memory belongs to one process.
REPLICA_CLASSES: dict[str, type[PipelinedReplica]] = {"cpu": PipelinedReplica}


def parts_of(
    model: torch.nn.Module, groups: Sequence[Group], compute: Compute, *, engine: str, threads: int
) -> DeviceSpread | Split | None:
    """Return the placement of a model on the devices of each replica; None: on a single device.

    Args:
        threads: intra-op threads of a worker.

    Raises:
        SettingError: no such placement is possible.
    """
    names = compute.split
    kinds = {device.type for group in groups for device in group}
    if names is None:
        if not any(len(group) > 1 for group in groups):
            return None
        is_placed = any(t.device.type != "cpu" for t in (*model.parameters(), *model.buffers()))
        if is_placed or ("cpu" in kinds and len(kinds) > 1):
            return DeviceSpread(model, groups)
        stages = stages_of(groups, compute.pipeline)
    else:
        require_devices(names, groups)
        stages = len(names) + 1
    if engine not in (PROCESSES, TOWERS):
        raise refused(names, f"the engine is {engine}", "take engine='processes', or leave it out")
    if engine == TOWERS and len(groups) > 1:
        raise refused(names, "several workers are towers: take engine='processes'")
    if "cpu" in kinds and threads > 1:  # OpenMP's threads do not outlive a fork
        raise refused(names, f"a worker has {threads} threads: with stages it has one for each")
    if "cpu" in kinds and sys.platform != "linux":
        raise refused(names, "stages are processes, which need Linux")
    return Split(names, stages, compute.pipeline)


def new_replica(
    model: torch.nn.Module,
    parameters: Flat,
    group: Group,
    *,
    spread: DeviceSpread | Split | None,
    **options: Any,
) -> Replica:
    """Return a replica; arguments as for ``Replica``."""
    if isinstance(spread, Split):
        way = REPLICA_CLASSES.get(group[0].type, ThreadedReplica)
        return way(model, parameters, group, split=spread, **options)
    return Replica(model, parameters, group, spread=spread, **options)
