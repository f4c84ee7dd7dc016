"""What an update of a table with gradients by rows costs, beside a plain loop of micro-batches.

    python benchmarks/sparse.py [--rows 1000000] [--width 32] [--read 64] [--optimizer sgd]

Per update 64 rows of data read so many rows each of the table, as 2 shards; a small dense network
stands on it. The plain loop computes the same two micro-batches one after the other. What is
counted is CPU time of the process, the least of some rounds, which take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate

ROWS, SHARDS = 64, 2
OPTIMIZERS = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}


class Table(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width, sparse=True)
        self.head = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, which: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(which).mean(1))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    which, labels = batch
    return F.cross_entropy(model(which), labels)


def data(rows: int, read: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    which = torch.randint(rows, (ROWS * 50, read), generator=generator)
    return TensorDataset(which, torch.randint(10, (ROWS * 50,), generator=generator))


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, dataset: TensorDataset) -> Iterator:
    """Make an update for each ``next``."""
    part = ROWS // SHARDS
    while True:
        for start in range(0, len(dataset), ROWS):
            optimizer.zero_grad()
            for first in range(start, start + ROWS, part):
                batch = torch.utils.data.default_collate(
                    [dataset[row] for row in range(first, first + part)]
                )
                (loss(model, batch) / SHARDS).backward()
            optimizer.step()
            yield


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--read", type=int, default=64)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    dataset, kind = data(chosen.rows, chosen.read), OPTIMIZERS[chosen.optimizer]
    model = Table(chosen.rows, chosen.width)
    trainer = quorate.Trainer(
        lambda: Table(chosen.rows, chosen.width),
        loss,
        optimizer=lambda params: kind(params, lr=0.1),
        batch_size=ROWS,
        shards=SHARDS,
        seed=0,
        devices="cpu",
        workers=1,
    )
    ours = iter(trainer.updates(dataset, steps=10**9, shuffle=False))
    theirs = plain(model, kind(model.parameters(), lr=0.1), dataset)
    least = dict.fromkeys(("plain", "quorate"), float("inf"))
    for _ in range(chosen.rounds):
        for name, updates in (("plain", theirs), ("quorate", ours)):
            began = time.process_time()
            for _ in range(chosen.updates):
                next(updates)
            least[name] = min(least[name], (time.process_time() - began) / chosen.updates)
    print(
        f"{chosen.rows:,} x {chosen.width}, {chosen.optimizer}, {ROWS} rows as {SHARDS} shards, "
        f"each reads {chosen.read}"
    )
    for name, seconds in least.items():
        print(f"{name:8} {seconds * 1e3:8.3f} ms of CPU per update")
    print(f"ratio    {least['quorate'] / least['plain']:8.2f}")


if __name__ == "__main__":
    main()
