"""DistributedDataParallel over gloo: a process per worker."""

from __future__ import annotations

import time
from functools import partial

import torch
import torch.distributed as dist
from protocol import Ranks, Wanted, run, serve, start_ranks
from torch.nn.parallel import DistributedDataParallel
from torch_workloads import (
    TUNED,
    WithLoss,
    Workload,
    autocast,
    made,
    optimizer_of,
    step_of,
    workload,
)

BUCKETS_MB = (1, 5, 25, 100)
TRIED_STEPS = 8


def peer(wanted: Wanted) -> None:
    """Train by DDP."""
    ranks = start_ranks(wanted.workers, connected=True)
    dist.init_process_group("gloo")
    work = workload(wanted.workload)
    module = made(wanted, work)
    tuned, options = "", {}
    if wanted.is_tuned:
        options = {"static_graph": True, "gradient_as_bucket_view": True}
        best = _best_bucket(wanted, work, module, ranks)
        options["bucket_cap_mb"] = best
        tuned = f"{TUNED}, static_graph, gradient_as_bucket_view, buckets of {best} MB"
    wrapped = DistributedDataParallel(module, **options)
    optimizer = optimizer_of(wanted, work, wrapped.parameters())
    step = step_of(wrapped, optimizer, work, ranks, context=partial(autocast, wanted))
    serve(work.per_worker, step, ranks=ranks, tuned=tuned)


def _best_bucket(wanted: Wanted, work: Workload, module: WithLoss, ranks: Ranks) -> int:
    """Return the size of the buckets with which a few steps take the least time on rank 0."""
    taken: dict[int, float] = {}
    for bucket in BUCKETS_MB:
        wrapped = DistributedDataParallel(
            module, static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=bucket
        )
        optimizer = optimizer_of(wanted, work, wrapped.parameters())
        step = step_of(wrapped, optimizer, work, ranks, context=partial(autocast, wanted))
        for number in range(2 * TRIED_STEPS):
            if number == TRIED_STEPS:
                begun = time.perf_counter()
            step()
        taken[bucket] = time.perf_counter() - begun
        optimizer.zero_grad()  # else gradients are views of these buckets
    best = torch.tensor(min(taken, key=lambda bucket: taken[bucket]))
    dist.broadcast(best, 0)
    return int(best)


if __name__ == "__main__":
    run(peer)
