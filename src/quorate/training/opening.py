"""The first lines of a run: what it does, on which devices, and which settings have no effect."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quorate.coordination import rules
from quorate.coordination.plan import Plan
from quorate.coordination.rules import Rule
from quorate.machine.devices import Group, describe, kinds
from quorate.machine.gpu_identity import mapping
from quorate.machine.memory_fraction import fraction_remark
from quorate.replica import deterministic, precision
from quorate.replica.computing import Computing
from quorate.replica.placement import placement


def opening(
    plan: Plan,
    groups: Sequence[Group],
    home: torch.device,
    model: torch.nn.Module,
    *,
    threads: int,
    rule: Rule,
    computing: Computing,
    memory_fraction: float | None,
) -> list[str]:
    """What to say before the first update.

    Args:
        groups: the devices of each worker.
        home: where the coordinator makes updates.
    """
    devices = [device for group in groups for device in group]
    lines = [
        _arithmetic(plan, groups, threads, rule, computing),
        *mapping(devices),
        *fraction_remark(devices, memory_fraction),
        *precision.remarks(computing.precision, devices),
        *placement.remarks(computing, devices, home),
        *deterministic.remarks(model, devices),
    ]
    if len(found := kinds(groups)) > 1:
        lines.append(f"bits depend on who computes a shard: {' and '.join(sorted(found))}")
    return lines


def _arithmetic(
    plan: Plan, groups: Sequence[Group], threads: int, rule: Rule, computing: Computing
) -> str:
    least, most = plan.batch_size // plan.shards, -(-plan.batch_size // plan.shards)
    each = f"{least}" if least == most else f"{least}-{most}"
    shards = f"{plan.shards} shard{'s' if plan.shards > 1 else ''}"
    each_has = f"{threads} thread{'s' if threads > 1 else ''} each"
    how = [rule.name]
    if computing.precision is not precision.FP32:
        how.append(computing.precision.name)
    if computing.compile:
        how.append("compiled")
    said = f"{plan.batch_size} rows = {shards} x {each} on {describe(groups)} ({each_has}), "
    said += ", ".join(how)
    return said if rules.keeps_bits(rule, plan.shards) else f"{said}: the bits depend on timing"
