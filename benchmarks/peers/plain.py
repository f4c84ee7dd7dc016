"""A loop by hand on one device; with two workers, two of them that know nothing of each other."""

from __future__ import annotations

from functools import partial

from protocol import Wanted, run, serve, start_ranks
from torch_workloads import TUNED, autocast, made, optimizer_of, step_of, workload


def peer(wanted: Wanted) -> None:
    """Train by hand."""
    ranks = start_ranks(wanted.workers, connected=False)
    work = workload(wanted.workload)
    module = made(wanted, work)
    optimizer = optimizer_of(wanted, work, module.parameters())
    step = step_of(module, optimizer, work, ranks, context=partial(autocast, wanted))
    serve(work.per_worker, step, ranks=ranks, tuned=TUNED if wanted.is_tuned else "")


if __name__ == "__main__":
    run(peer)
