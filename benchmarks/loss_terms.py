"""The cost of terms of a loss with totals of their own: updates per second, beside plain torch.

    python benchmarks/loss_terms.py [--workers 2] [--width 512]

Three trainings of one encoder: a mean over masked tokens alone; with a mean over rows of the same
weight; with a mean over rows, whose total differs, so that a second pass computes the gradient.
Plain torch computes the last loss on the whole batch. Rounds alternate; the medians are printed.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate

BATCH, SHARDS, TOKENS, STEPS, ROUNDS = 64, 8, 32, 24, 5


class Encoder(nn.Module):
    """Layers over tokens, with a head for words and a head for rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)]
        self.body = nn.Sequential(*layers)
        self.words, self.pairs = nn.Linear(width, 100), nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits of words, (b, t, 100), and of rows, (b, 2)."""
        hidden = self.body(x)
        return self.words(hidden), self.pairs(hidden.mean(1))


def terms(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean over masked tokens, the mean over rows, and the number of tokens."""
    x, classes, mask = batch
    words, pairs = model(x)
    return (
        F.cross_entropy(words[mask], classes[mask]),
        F.cross_entropy(pairs, classes[:, 0] % 2),
        mask.sum(),
    )


def one(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Return one mean over tokens."""
    mlm, nsp, n = terms(model, batch)
    return {"loss": mlm + nsp, "weight": n}


def same(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Return two terms with the same weight."""
    mlm, nsp, n = terms(model, batch)
    return {"loss": {"mlm": mlm, "nsp": nsp}, "weight": n}


def two(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Return two terms with different totals."""
    mlm, nsp, n = terms(model, batch)
    return {"loss": {"mlm": {"loss": mlm, "weight": n}, "nsp": nsp}}


def rows(width: int) -> TensorDataset:
    """Return random rows."""
    draw = torch.Generator().manual_seed(0)
    count = BATCH * STEPS
    x = torch.randn(count, TOKENS, width, generator=draw)
    mask = torch.rand(count, TOKENS, generator=draw) < 0.15
    return TensorDataset(x, torch.randint(0, 100, (count, TOKENS), generator=draw), mask)


def speed(loss: Any, data: TensorDataset, width: int, workers: int) -> float:
    """Return the updates per second of a training, without the first updates."""
    trainer = quorate.Trainer(
        lambda: Encoder(width),
        loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        batch_size=BATCH,
        shards=SHARDS,
        workers=quorate.Workers(workers, engine="towers"),
        devices="cpu",
    )
    began = 0.0
    for report in trainer.updates(data, steps=STEPS):
        if report.global_step == 4:
            began = time.perf_counter()
    return (STEPS - 4) / (time.perf_counter() - began)


def plain_speed(data: TensorDataset, width: int) -> float:
    """Return the updates per second of plain torch on whole batches."""
    model = Encoder(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    began = 0.0
    for step in range(STEPS):
        if step == 4:
            began = time.perf_counter()
        mlm, nsp, _ = terms(model, data[step * BATCH : (step + 1) * BATCH])
        optimizer.zero_grad()
        (mlm + nsp).backward()
        optimizer.step()
    return (STEPS - 4) / (time.perf_counter() - began)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    data, found = rows(options.width), dict[str, list[float]]()
    for _ in range(ROUNDS):
        for name, loss in (("one term", one), ("two, one total", same), ("two, two totals", two)):
            updates = speed(loss, data, options.width, options.workers)
            found.setdefault(name, []).append(updates)
        found.setdefault("plain torch", []).append(plain_speed(data, options.width))
    first = median(found["one term"])
    for name, values in found.items():
        spread = f"{min(values):.2f} to {max(values):.2f}"
        print(f"{name:16} {median(values):7.2f} updates/s ({spread})  {first / median(values):.2f}")


if __name__ == "__main__":
    main()
