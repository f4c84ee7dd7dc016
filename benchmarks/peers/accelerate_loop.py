"""Accelerate on CPUs: DDP over gloo by way of its Accelerator."""

from __future__ import annotations

import os

from protocol import Wanted, run, serve, start_ranks
from torch_workloads import TUNED, made, optimizer_of, step_of, workload


def peer(wanted: Wanted) -> None:
    """Train by Accelerate."""
    ranks = start_ranks(wanted.workers, connected=True)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    from accelerate import Accelerator

    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16" if wanted.precision == "bf16" else "no"
    )
    assert accelerator.num_processes == wanted.workers
    work = workload(wanted.workload)
    module = made(wanted, work)
    optimizer = optimizer_of(wanted, work, module.parameters())
    module, optimizer = accelerator.prepare(module, optimizer)
    step = step_of(
        *(module, optimizer, work, ranks),
        context=accelerator.autocast,
        backward=accelerator.backward,
    )
    serve(work.per_worker, step, ranks=ranks, tuned=TUNED if wanted.is_tuned else "")


if __name__ == "__main__":
    run(peer)
