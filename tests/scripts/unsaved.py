"""A script that goes on otherwise when it is resumed; the argument says how.

    quorate verify tests/scripts/unsaved.py -- rate

rate: with another learning rate. rows: over other rows. optimizer: its optimizer keeps a state in
an object that nobody can save. attribute: a callback has the loss use another factor, which it
begins anew.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate


class Clock:
    def __init__(self) -> None:
        self.steps = 0


class Warming(torch.optim.SGD):
    """Takes longer steps each time."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.clock = Clock()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.clock.steps += 1
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.grad *= self.clock.steps / 10
        super().step(closure)


class Anneal(quorate.Callback):
    """Lowers a factor in the model's weights with each update that it sees."""

    def __init__(self) -> None:
        self.seen = 0

    def started(self, trainer: Any) -> None:
        self.model = trainer.model

    def updated(self, report: Any) -> None:
        self.seen += 1
        with torch.no_grad():
            self.model.factor.fill_(1 / self.seen)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.factor


def loss(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


if __name__ == "__main__":
    how = sys.argv[1]
    lr = 0.1
    kind: Any = Warming if how == "optimizer" else torch.optim.SGD
    trainer = quorate.Trainer(
        Net,
        loss,
        optimizer=lambda parameters: kind(parameters, lr=lr),
        batch_size=24,
        devices="cpu",
    )
    folder = trainer.run_dir
    is_resumed = folder is not None and any(folder.glob("checkpoints/step-*"))
    if how == "rate" and is_resumed:
        lr = 0.05
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(5))
    y = (x.sum(1) > 0).long()
    if how == "rows" and is_resumed:
        x = x * 1.5
    callbacks = [Anneal()] if how == "attribute" else []
    trainer.fit(TensorDataset(x, y), epochs=3, callbacks=callbacks)
