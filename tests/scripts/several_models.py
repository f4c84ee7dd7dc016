"""A GAN with everything that could make a result depend on who computed it: d, d, g each round.

    quorate run --devices cpu --workers 2 tests/scripts/several_models.py STEPS [KILLS]

BatchNorm, dropout and noise in the losses; an optimizer, a clip, a schedule and averaged weights of
each phase's own. An epoch has 11 batches and 16 updates, the last a d whose round is not
gone to its end. With KILLS, a callback kills so many worker processes.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate

ROWS = TensorDataset(torch.randn(88, 6, generator=torch.Generator().manual_seed(3)))


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 24), nn.BatchNorm1d(24), nn.Linear(24, 6)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(F.relu(self.norm(self.first(noise))))
        return made


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(6, 24), nn.Dropout(0.2), nn.Linear(24, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        said: torch.Tensor = self.last(self.dropout(F.leaky_relu(self.first(rows), 0.2)))
        return said


def d_loss(model: nn.ModuleDict, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    real = model["d"](batch[0])
    fake = model["d"](model["g"](torch.randn(len(batch[0]), 3)))
    loss = F.softplus(-real).mean() + F.softplus(fake).mean()
    return {"loss": loss, "right": (real > 0).float().mean()}


def g_loss(model: nn.ModuleDict, batch: list[torch.Tensor]) -> torch.Tensor:
    return F.softplus(-model["d"](model["g"](torch.randn(len(batch[0]), 3)))).mean()


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=2e-3, betas=(0.5, 0.99))


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def made(**options: object) -> quorate.Trainer:
    """Return a trainer of both."""
    settings = {
        "optimizer": {
            "d": quorate.Optimize(momentum, clip_norm=0.5),
            "g": quorate.Optimize(
                adam,
                schedule=lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20),
                ema_decay=0.95,
            ),
        },
        "batch_size": 8,
        "shards": 4,
    } | options
    losses = [("d", d_loss), ("d", d_loss), ("g", g_loss)]
    return quorate.Trainer({"g": Generator, "d": Critic}, losses, **settings)  # type: ignore[arg-type]


class Kills(quorate.Callback):
    """Kills a worker process after some updates, each time another one."""

    def __init__(self, kills: int) -> None:
        self.left = kills

    def updated(self, report: quorate.Report) -> None:
        pids = [status.pid for status in trainer.workers if status.pid not in (None, os.getpid())]
        if self.left and report.global_step % 4 == 2 and len(pids) > 1:
            self.left -= 1
            os.kill(pids[self.left % len(pids)], signal.SIGKILL)


if __name__ == "__main__":
    trainer = made()
    kills = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    trainer.fit(ROWS, steps=int(sys.argv[1]), validation=ROWS, callbacks=[Kills(kills)])
