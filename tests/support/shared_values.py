"""What tests of ``Shared`` train: a small network on rows of three features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support import front_door
from torch import nn
from torch.utils.data import TensorDataset

import quorate

CPU = torch.device("cpu")
ROWS = TensorDataset(
    torch.randn(24, 3, generator=torch.Generator().manual_seed(0)),
    torch.randn(24, 1, generator=torch.Generator().manual_seed(1)),
)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def trainer(loss: Callable[..., Any], towers: int = 1, **settings: Any) -> quorate.Trainer:
    return front_door.trainer(
        net,
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        batch_size=8,
        shards=4,
        devices=["cpu"] * towers,
        engine="towers",
        **settings,
    )
