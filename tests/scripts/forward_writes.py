"""Models that write their own trained parameters in forward, each in a way of its own.

    quorate run --devices cpu --run-dir RUN tests/scripts/forward_writes.py KIND STEPS [FILE]

With FILE, which is not there yet, a worker process kills itself once. Prints a line of JSON: the
loss of each update.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.transports.processes.worker import here

ROWS, BATCH = 64, 16


class Renormed(nn.Linear):
    """A layer whose rows keep a bounded norm, as in EEGNet."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(x)


class Clamped(nn.Linear):
    """A layer whose weights are clamped in place, by the way that is asked for."""

    how = "no_grad"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "data":
            self.weight.data.clamp_(-0.1, 0.1)
        elif self.how == "copy":
            self.weight.data.copy_(self.weight.clamp(-0.1, 0.1))
        else:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class ClampedLater(nn.Linear):
    """A layer whose weights are clamped by .data, which changes none of them at first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(-0.3, 0.3)
        return super().forward(x)


class Standardised(nn.Linear):
    """A layer whose weights are standardised in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.sub_(self.weight.mean(1, keepdim=True))
        return super().forward(x)


class ActNorm(nn.Module):
    """Scale and shift that the first rows determine."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.ones(width))
        self.register_buffer("is_set", torch.zeros((), dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_set:
            with torch.no_grad():
                self.shift.data.copy_(-x.mean(0))
                self.scale.data = 1 / (x.std(0, correction=0) + 0.1)
                self.is_set.fill_(True)
        return (x + self.shift) * self.scale


class Words(nn.Module):
    """The mean of embeddings whose norm is bounded."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embedding, self.last = kind(20, 8, max_norm=0.5), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.embedding(x)
        logits: torch.Tensor = self.last(found.mean(1) if found.dim() == 3 else found)
        return logits


def clamped(how: str) -> nn.Module:
    layer = Clamped(16, 4)
    layer.how = how
    return layer


def after_a_layer(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), make())


KINDS: dict[str, Callable[[], nn.Module]] = {
    "renorm": after_a_layer(lambda: Renormed(16, 4)),
    "clamp": after_a_layer(lambda: clamped("no_grad")),
    "data": after_a_layer(lambda: clamped("data")),
    "later": after_a_layer(lambda: ClampedLater(16, 4)),
    "copy": after_a_layer(lambda: clamped("copy")),
    "standardised": after_a_layer(lambda: Standardised(16, 4)),
    "embedding": lambda: Words(nn.Embedding),
    "bag": lambda: Words(nn.EmbeddingBag),
    "actnorm": after_a_layer(lambda: nn.Sequential(ActNorm(16), nn.Linear(16, 4))),
}


def made(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return KINDS[kind]()


def rows(kind: str) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(ROWS, 6, generator=draw), torch.randint(0, 4, (ROWS,), generator=draw)
    words = torch.randint(0, 20, (ROWS, 5), generator=draw)
    return TensorDataset(words if kind in ("embedding", "bag") else x, y)


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5, momentum=0.9)


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def plain(kind: str, steps: int) -> tuple[nn.Module, list[float]]:
    """Train by a loop of plain torch, over whole batches."""
    model, (x, y), losses = made(kind), rows(kind).tensors, []
    made_optimizer = optimizer(model.parameters())
    for step in range(steps):
        start = step * BATCH % ROWS
        value = loss(model, [x[start : start + BATCH], y[start : start + BATCH]])
        made_optimizer.zero_grad()
        value.backward()
        made_optimizer.step()
        losses.append(value.item())
    return model, losses


def killing(kind: str, file: str) -> Callable[[nn.Module, Any], torch.Tensor]:
    """Return the loss; the worker that comes first to shard 0 of step 2 dies there."""
    deadly_rows = rows(kind).tensors[1][2 * BATCH : 2 * BATCH + BATCH // 4]

    def deadly(model: nn.Module, batch: Any) -> torch.Tensor:
        if here() is not None and torch.equal(batch[1], deadly_rows) and not Path(file).exists():
            Path(file).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(model, batch)

    return deadly


if __name__ == "__main__":
    kind, steps = sys.argv[1], int(sys.argv[2])
    trainer = quorate.Trainer(
        made(kind),
        killing(kind, sys.argv[3]) if len(sys.argv) > 3 else loss,
        optimizer=optimizer,
        batch_size=BATCH,
        shards=4,
    )
    losses = [r.loss for r in trainer.updates(rows(kind), steps=steps, shuffle=False)]
    if trainer.run_dir is not None:
        trainer.save()
    print(json.dumps(losses))
