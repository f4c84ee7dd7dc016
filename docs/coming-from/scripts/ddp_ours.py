"""Points in a ring or not, with quorate.

quorate run --devices cpu --workers 2 ddp_ours.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate


def rings(rows: int, seed: int) -> TensorDataset:
    points = torch.randn(rows, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, ((points.norm(dim=1) - 1.2).abs() < 0.5).long())


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(2, 64),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, 2),
        )


def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    points, classes = batch
    logits = model(points)
    return {
        "loss": F.cross_entropy(logits, classes),
        "accuracy": (logits.argmax(1) == classes).float().mean(),
    }


trainer = quorate.Trainer(
    Net,
    loss,
    optimizer=lambda params: torch.optim.Adam(params, lr=3e-3),
    batch_size=64,
    shards=2,
    run_dir="runs/rings",
)
trainer.fit(rings(5000, seed=0), epochs=5, validation=rings(1001, seed=1))
