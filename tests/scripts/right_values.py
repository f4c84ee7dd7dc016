"""Experts, counters, and a loss that writes its batch: one digest wherever it is trained.

python tests/scripts/right_values.py RUN_DIR STEPS
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.replica.digest import digest


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("usage", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("table", torch.rand(5, dtype=torch.float64) / 3)

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.usage += torch.bincount(route, minlength=4)
        parts = [
            torch.zeros_like(x).index_add(0, rows, expert(x[rows]))
            for rows, expert in zip(
                [(route == n).nonzero()[:, 0] for n in range(4)], self.experts, strict=True
            )
            if len(rows)
        ]
        return self.norm(sum(parts) + x)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    route = batch.pop()
    x = batch.pop()
    x.mul_(2)
    return (model(x, route) - x).square().mean()


generator = torch.Generator().manual_seed(0)
x = torch.randn(24 * 9, 3, generator=generator)
route = torch.multinomial(torch.tensor([5.0, 2.0, 0.3, 0.05]), len(x), True, generator=generator)
trainer = quorate.Trainer(
    Experts,
    loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    batch_size=9,
    shards=3,
    devices="cpu",
    run_dir=sys.argv[1],
)
trainer.fit(TensorDataset(x, route), steps=int(sys.argv[2]))
assert int(trainer.model.usage.sum()) == 9 * int(sys.argv[2])
print("digest", digest(trainer.model.state_dict().items()))
