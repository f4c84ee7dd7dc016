"""Lightning Fabric on CPUs: its strategy "ddp", over gloo."""

from __future__ import annotations

from contextlib import nullcontext

from lightning_fabric import Fabric
from protocol import Wanted, run, serve, start_ranks
from torch_workloads import TUNED, made, optimizer_of, step_of, workload


def peer(wanted: Wanted) -> None:
    """Train by Fabric."""
    ranks = start_ranks(wanted.workers, connected=True)
    fabric = Fabric(
        accelerator="cpu",
        devices=wanted.workers,
        strategy="ddp",
        precision="bf16-mixed" if wanted.precision == "bf16" else "32-true",
    )
    fabric.launch()
    assert fabric.world_size == wanted.workers
    work = workload(wanted.workload)
    module = made(wanted, work)
    optimizer = optimizer_of(wanted, work, module.parameters())
    module, optimizer = fabric.setup(module, optimizer)
    step = step_of(
        *(module, optimizer, work, ranks),
        context=nullcontext,  # Fabric's own is around forward
        backward=fabric.backward,
    )
    serve(work.per_worker, step, ranks=ranks, tuned=TUNED if wanted.is_tuned else "")


if __name__ == "__main__":
    run(peer)
