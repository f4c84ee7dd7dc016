"""Worker processes for one training loop: of this machine, or on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from quorate.engines import Transport, selection
from quorate.engines.job import Original
from quorate.engines.processes.arena import Arena
from quorate.engines.processes.pool import WorkerPool
from quorate.engines.processes.script import Script
from quorate.engines.processes.supervisor import ElasticSize
from quorate.engines.processes.transport import Processes
from quorate.engines.processes.worker_process import LocalPool
from quorate.engines.ray.demand import demanded
from quorate.engines.servers import Servers
from quorate.engines.workers import Workers
from quorate.machine.devices import Group
from quorate.replica.buffers import Buffers
from quorate.replica.flat import Flat
from quorate.replica.notes import Notes
from quorate.replica.replica import Replica


class Kept(NamedTuple):
    """What a coordinator has of a model, and workers compute from."""

    model: torch.nn.Module
    parameters: Flat
    average: Flat | None
    buffers: Buffers
    mutable_frozen: Collection[int]
    written: Collection[str]
    again: bool  # whether a step is computed again while the results of its first time wait
    original: Original
    in_stages: bool  # whether shards flow through stages of each worker
    handler: str | None = None  # of slices, if servers have them: see ``handler_of``


def worker_processes(
    script: Script,
    workers: Workers,
    groups: Sequence[Group],
    kept: Kept,
    datasets: Mapping[str, Any],
    *,
    results: int,
    on_snapshots: bool,
    decided: Mapping[str, Any],
    timeout_s: float,
    probe: Callable[[], Replica],
    say: Callable[[str], None],
    notes: Notes,
) -> Processes:
    """Return new worker processes; the caller closes them.

    Args:
        script: what they run.
        workers: as they were asked for.
        groups: the devices of each.
        kept: what they compute from.
        datasets: what the loop was called with, by the names that workers know it by.
        results: how many shards' results may wait for others of their step, or to be applied.
        on_snapshots: whether they compute from snapshots.
        decided: how they compute, as far as the coordinator found it out; see ``Computing``.
        timeout_s: how long one may take to reach the training loop, and to answer there.
        probe: makes a replica of the model, which workers are compared with.
        say: shows a line to the user.
        notes: those of workers go there.

    Raises:
        UserError: the machine or the cluster has not what they need.
        WorkerError: a process cannot be started.
    """
    arena = Arena.create(
        kept.model,
        kept.parameters,
        kept.average,
        mutable_frozen=kept.mutable_frozen,
        written=kept.written,
        results=results,
        again=kept.again,
        on_snapshots=on_snapshots,
        workers=len(groups),
        in_stages=kept.in_stages,
    )
    site = _site(script, arena, workers, len(groups), kept.handler)
    if (servers := site.servers) is not None:
        each = ", ".join(f"server {n} on {where}" for n, where in enumerate(servers.where))
        say(f"{servers.count} slices of the parameters: {each}")
    processes = Processes(
        script,
        site,
        arena,
        kept.model,
        kept.buffers,
        probe,
        groups,
        datasets,
        threads=workers.threads,
        decided=decided,
        timeout_s=timeout_s,
        say=say,
        notes=notes,
        original=kept.original,
        growth=_growth(workers),
    )
    if servers is not None:
        servers.watch(processes.wake)
    return processes


def _growth(workers: Workers) -> ElasticSize | None:
    if workers.engine != selection.RAY or (demand := demanded(workers)).least is None:
        return None
    return ElasticSize(demand.least, f"the Ray cluster has room for {demand.text()} each")


def servers_of(workers: Transport) -> Servers | None:
    """Return the servers that have the parameters of such workers; None: the coordinator has."""
    return workers.servers if isinstance(workers, Processes) else None


def _site(
    script: Script, arena: Arena, workers: Workers, count: int, handler: str | None
) -> WorkerPool:
    if workers.engine != selection.RAY:
        return LocalPool(script, count, workers.threads)
    from quorate.engines.ray.pool import RayPool  # imports Ray, which is an extra

    demand, servers = demanded(workers), None
    if workers.servers is not None and handler is not None:
        servers = (workers.servers, handler)
    where = workers.address, workers.working_dir
    return RayPool(script, arena, demand, *where, workers.threads, servers)
