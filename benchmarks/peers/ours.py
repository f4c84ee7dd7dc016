"""quorate: the variant is the engine, or "alone": copies that know nothing of each other.

"collective, native" has torch.distributed add the gradients, in its own order.
"""

from __future__ import annotations

import torch
from protocol import Ranks, Wanted, run, serve, start_ranks
from torch.utils.data import TensorDataset
from torch_workloads import workload

import quorate

EPOCHS = 1_000_000


def peer(wanted: Wanted) -> None:
    """Train by quorate; worker processes and ranks run this too, up to the loop."""
    is_alone = wanted.variant == "alone"
    engine, _, exchange = wanted.variant.partition(", ")
    ranks = start_ranks(wanted.workers, connected=False) if is_alone else Ranks(0, 1, [])
    workers = 1 if is_alone else wanted.workers
    work = workload(wanted.workload)
    clip_norm = {} if work.clip_norm is None else {"clip_norm": work.clip_norm}
    trainer = quorate.Trainer(
        work.model,
        work.loss,
        optimizer=quorate.Optimize(work.optimizer, **clip_norm),
        batch_size=work.per_worker * workers,
        shards=workers,
        devices="cpu",
        workers=quorate.Workers(
            workers, engine="towers" if is_alone else engine, exchange=exchange or "ordered"
        ),
        precision=wanted.precision,
    )
    torch.manual_seed(0)
    updates = trainer.updates(TensorDataset(*work.tensors), epochs=EPOCHS)
    try:
        next(updates)  # the probe is over, and all workers are here
        serve(work.per_worker * workers, lambda: float(next(updates).loss), ranks=ranks)
    finally:
        updates.close()


if __name__ == "__main__":
    run(peer)
