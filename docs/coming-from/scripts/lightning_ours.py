"""A sine in noise, with quorate.

quorate run --devices cpu --workers 2 lightning_ours.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.callbacks import EarlyStopping


def waves(rows: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, 1, generator=generator) * 6 - 3
    return TensorDataset(x, torch.sin(2 * x) + 0.1 * torch.randn(rows, 1, generator=generator))


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )


def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    x, y = batch
    predicted = model(x)
    return {"loss": F.mse_loss(predicted, y), "error": (predicted - y).abs().mean()}


trainer = quorate.Trainer(
    Net,
    loss,
    optimizer=quorate.Optimize(lambda params: torch.optim.AdamW(params, lr=1e-2), clip_norm=1.0),
    batch_size=64,
    shards=2,
    run_dir="runs/waves",
)
trainer.fit(
    waves(4000, seed=0),
    epochs=20,
    validation=quorate.Validation(waves(1001, seed=1), best="min:loss"),
    callbacks=[EarlyStopping(patience=3)],
)
