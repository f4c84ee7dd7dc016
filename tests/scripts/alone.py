"""Rows that draw, BatchNorm, dropout and Adam; the argument is the rows of a batch.

quorate run --devices cpu --workers 1 --shards 4 --update async tests/scripts/alone.py 12
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import Dataset

import quorate


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(6) + row % 3
        return x, x.sum().sign()


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return (model(x)[:, 0] - y).square().mean()


torch.manual_seed(2)
quorate.Trainer(
    lambda: nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1)
    ),
    loss,
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
    batch_size=int(sys.argv[1]),
).fit(Rows(), epochs=2)
