"""A training with a validation set that takes long enough for somebody to kill a worker.

    quorate run --devices cpu --workers 2 tests/scripts/reported.py 60

Argument: updates.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad


def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    error = (Slow.apply(model(batch[0])) - batch[1]).square().mean()
    return {"loss": error, "absolute": error.sqrt()}


def rows(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True))


trainer = quorate.Trainer(
    lambda: nn.Linear(6, 1),
    loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
    batch_size=16,
    shards=4,
)
trainer.fit(rows(320, 0), steps=int(sys.argv[1]), validation=rows(32, 1))
