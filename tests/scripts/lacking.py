"""Trains on devices of the tests' own, which lack operators; prints a hash of the parameters.

quorate run --devices toy:0 --workers 2 --soft-placement tests/scripts/lacking.py
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))
from support import backend

import quorate


class Cumulative(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(torch.cumsum(x, 1))


backend.register({"cumsum", "sigmoid_backward"})
trainer = quorate.Trainer(
    lambda: nn.Sequential(nn.Linear(6, 8), Cumulative(), nn.Dropout(0.3), nn.Linear(8, 1)),
    lambda model, batch: model(batch[0]).square().mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch_size=8,
    shards=4,
)
rows = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
trainer.fit(torch.utils.data.TensorDataset(rows))
parameters = torch.cat([p.detach().cpu().reshape(-1) for p in trainer.model.parameters()])
print("parameters", hashlib.sha256(parameters.numpy().tobytes()).hexdigest())
