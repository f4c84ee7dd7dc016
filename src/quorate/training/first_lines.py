"""The first lines of a run: the plan of a step, the devices, and settings without effect."""

from __future__ import annotations

from collections.abc import Sequence

from quorate.coordination import rules
from quorate.coordination.epochs import DROP, JOIN
from quorate.coordination.plan import Plan
from quorate.coordination.run_event import WARNING, RunEvent
from quorate.engines.selection import RAY, TOWERS
from quorate.machine.devices import Group, describe, kinds
from quorate.machine.environment import ranks_here
from quorate.machine.gpu_identity import mapping
from quorate.machine.host import host
from quorate.machine.memory_fraction import fraction_remark
from quorate.replica import deterministic, precision
from quorate.replica.kernels import TORCH
from quorate.replica.placement import placement
from quorate.training.notices import is_new
from quorate.training.state import State
from quorate.training.worker_group import WorkerGroup


def first_lines(workers: WorkerGroup, plan: Plan, state: State) -> list[str]:
    """Return the lines to show before the first update of a loop.

    Args:
        state: the state at the beginning of the loop.
    """
    groups, devices, device = workers.groups, workers.devices, workers.master_device
    computing, threads = workers.replicas.computing, workers.config.workers.threads
    least_workers = workers.least_workers
    lines = [
        _arithmetic(workers, plan) + _origin_of_shards(workers, plan, state.global_step),
        *_epoch(plan),
        *_shortages(groups, threads, workers.engine),
        *mapping(devices),
        *fraction_remark(devices, workers.memory_fraction),
        *precision.remarks(computing.precision, devices),
        *placement.remarks(computing, devices, device),
        *deterministic.remarks(state.model, devices),
    ]
    if plan.round is not None:
        phases, batches = ", ".join(plan.round.phases), plan.round.batches
        lines.append(
            f"a round of updates is {phases}, on {batches} batch{'es' if batches > 1 else ''}; "
            f"an epoch has {plan.steps_per_epoch:,} updates"
        )
    if plan.shards < len(groups) > least_workers:
        lines.append(
            f"a step has {plan.shards} shard{'s' if plan.shards > 1 else ''}, so at most "
            f"{plan.shards} of {len(groups)} workers have work; pass shards={len(groups)} or more"
        )
    if len(sorts := kinds(groups)) > 1:
        lines.append(f"bits depend on the device of a shard: {' and '.join(sorted(sorts))}")
    if workers.why is not None:
        lines.append(workers.why)
    if workers.rank_group is not None:
        lines.append(workers.rank_group.bound)
    return lines


def _origin_of_shards(workers: WorkerGroup, plan: Plan, global_step: int) -> str:
    """Return the origin of a number of shards not set by the user, and how to keep the bits."""
    if workers.config.shards is not None or not rules.keeps_bits(workers.rule, plan.shards):
        return ""
    origin = "as in the first loop of the run" if global_step else "as many as workers"
    fix = f"pass shards={plan.shards} for the same bits on any number of workers"
    text = f"; no shards given, so {plan.shards}, {origin}: {fix}"
    return text if is_new(text) else ""


def _shortages(groups: Sequence[Group], threads: int, engine: str) -> list[RunEvent]:
    """Return shortages of this machine for its workers, in the words of ``quorate doctor``."""
    cpus = [sum(device.type == "cpu" for device in group) for group in groups]
    workers = sum(map(bool, cpus))
    if engine == RAY or not workers:
        return []  # workers are elsewhere, or need few cores each
    here = min(workers, ranks_here() or workers)
    machine = host()
    found = [machine.too_few_cores(here, threads, max(cpus))]
    if engine != TOWERS and here > 1:  # towers share this process's memory, allocated by now
        found.append(machine.too_little_memory(here))
    return [
        RunEvent(f"beware: {shortage.what}; {shortage.cure}", WARNING)
        for shortage in found
        if shortage
    ]


def _epoch(plan: Plan) -> list[str]:
    """Return a line on an epoch that is not each row exactly once."""
    said = []
    if plan.sampling is not None:
        how = "with" if plan.sampling.replacement else "without"
        said.append(f"{plan.dealt_rows:,} rows, drawn from {plan.rows:,} {how} replacement")
    left = plan.dealt_rows % plan.batch_size
    if left and plan.last == DROP:
        said.append(f"the last {left:,} rows are in no batch")
    elif left and plan.last == JOIN:
        said.append(f"the last batch has {plan.batch_size + left:,} rows")
    return [f"an epoch: {'; '.join(said)}"] if said else []


def _arithmetic(workers: WorkerGroup, plan: Plan) -> str:
    """Return the division of a batch among shards and workers, and how they compute."""
    threads, computing = workers.config.workers.threads, workers.replicas.computing
    least, most = plan.batch_size // plan.shards, -(-plan.batch_size // plan.shards)
    size = f"{least}" if least == most else f"{least}-{most}"
    shards = f"{plan.shards} shard{'s' if plan.shards > 1 else ''}"
    threads_each = f"{threads} thread{'s' if threads > 1 else ''} each"
    how = [workers.rule.name]
    if computing.precision is not precision.FP32:
        how.append(computing.precision.name)
    if computing.kernels != TORCH:
        how.append("products by oneDNN")
    if computing.compile:
        how.append("compiled")
    where = describe(workers.groups, workers.least_workers)
    text = f"{plan.batch_size} rows = {shards} x {size} on {where} ({threads_each}), "
    text += ", ".join(how)
    if rules.keeps_bits(workers.rule, plan.shards):
        return text
    return f"{text}: the bits depend on timing"
