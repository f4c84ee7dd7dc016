"""A small adversarial pair in two phases, and the plain loop of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from support.trainings.models import critic, generator
from torch import nn
from torch.utils.data import TensorDataset

import quorate

ROWS = 58  # 6 batches of 10, the last of 8 rows


def dataset(dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Rows of five features, and the noise of each."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(ROWS, 5, generator=generator, dtype=dtype),
        torch.randn(ROWS, 3, generator=generator, dtype=dtype),
    )


def d_loss(model: nn.ModuleDict, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    real, fake = model["d"](batch[0]), model["d"](model["g"](batch[1]))
    loss = F.softplus(-real).mean() + F.softplus(fake).mean()
    return {"loss": loss, "right": (real > 0).float().mean()}


def g_loss(model: nn.ModuleDict, batch: list[torch.Tensor]) -> torch.Tensor:
    return F.softplus(-model["d"](model["g"](batch[1]))).mean()


LOSSES = [("d", d_loss), ("d", d_loss), ("g", g_loss)]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, betas=(0.5, 0.99))


def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


OPTIMIZERS = {
    "d": quorate.Optimize(sgd, clip_norm=0.2),
    "g": quorate.Optimize(adam, schedule=halved, ema_decay=0.9),
}


def models() -> dict[str, nn.Module]:
    return {"g": generator(3, 8, 5), "d": critic(5, 8, 0.0)}


def trainer(loss: Any = LOSSES, model: Any = models, **options: Any) -> quorate.Trainer:
    defaults = {"optimizer": OPTIMIZERS, "batch_size": 10, "shards": 2, "devices": ["cpu"]}
    return quorate.Trainer(model, loss, **defaults | options)
