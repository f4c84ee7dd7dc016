"""Whether a long run stays as it was: memory of every process, and the time of an update.

    python benchmarks/endurance.py [--updates 100000] [--workers 1] [--engine towers] [--hidden 64]

The perceptron of overhead.py (a wider one takes longer), two shards an update. After each tenth of
the updates: milliseconds per update over it, and resident memory of each process of the run. The
first tenth warms up; the last is compared with the second: it is to be within 1% and 3%.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate

ROWS, BATCH, TENTHS = 12_800, 64, 10


def children(pid: int) -> list[int]:
    """Return the numbers of a process's children, and theirs."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *children(int(child))]
    return found


def resident_mb(pid: int) -> float:
    """Return what a process has in memory, without what it shares with files: MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1000
    return 0.0


def memory() -> dict[int, float]:
    """Return the memory of each process of this run, by number."""
    return {pid: resident_mb(pid) for pid in [os.getpid(), *children(os.getpid())]}


def main() -> None:
    """Run, and print a line for each tenth."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--engine", default=None)
    parser.add_argument("--hidden", type=int, default=64)
    told = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 32, generator=generator)
    data = TensorDataset(x, torch.randint(0, 4, (ROWS,), generator=generator))

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    trainer = quorate.Trainer(
        lambda: nn.Sequential(nn.Linear(32, told.hidden), nn.ReLU(), nn.Linear(told.hidden, 4)),
        loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-3, fused=True),
        batch_size=BATCH,
        shards=2,
        devices="cpu",
        workers=quorate.Workers(told.workers, engine=told.engine),
    )
    tenth = told.updates // TENTHS
    times: list[float] = []
    held: list[dict[int, float]] = []
    begun = time.perf_counter()
    for report in trainer.updates(data, steps=TENTHS * tenth):
        if report.global_step % tenth == 0:
            times.append((time.perf_counter() - begun) / tenth * 1e3)
            held.append(memory())
            shown = ", ".join(f"{mb:.1f}" for mb in held[-1].values())
            print(f"{report.global_step:>8,} updates: {times[-1]:.4f} ms, {shown} MB", flush=True)
            begun = time.perf_counter()
    grown = {pid: mb / held[1][pid] - 1 for pid, mb in held[-1].items() if held[1].get(pid)}
    shown = ", ".join(f"{share:+.2%}" for share in grown.values())
    print(f"time of an update {times[-1] / times[1] - 1:+.2%}, memory of each process {shown}")


if __name__ == "__main__":
    main()
