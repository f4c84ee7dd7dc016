"""A small training with everything that a checkpoint has to hold.

The model has an untrained parameter, running statistics and dropout; learning rate and momentum
follow a schedule; the weights are averaged. An epoch has five updates, the last update with fewer
rows.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import front_door
from support.fits import squares
from torch import nn
from torch.utils.data import TensorDataset

import quorate

loss = squares
# 56 rows of (6 features, target)
DATA = TensorDataset(
    torch.randn(56, 6, generator=torch.Generator().manual_seed(0)),
    torch.randn(56, 1, generator=torch.Generator().manual_seed(1)),
)


class Small(nn.Module):
    """A network of two layers, and a third layer, frozen and unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 1)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.dropout(self.norm(self.first(x)), 0.2, self.training))


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a schedule of the learning rate, and of the momentum if present."""
    momentum = not isinstance(optimizer, torch.optim.Adafactor)
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=100, cycle_momentum=momentum
    )


def trainer(run_dir: Path | None, workers: int = 2, **options: Any) -> quorate.Trainer:
    """Return a trainer of ``Small`` on towers.

    Args:
        run_dir: where to save and to resume, if anywhere.
        workers: the number of towers.
        options: more of ``Trainer``'s, and replacements of the defaults below.
    """
    defaults: dict[str, Any] = {
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.01),
        "schedule": one_cycle,
        "ema_decay": 0.9,
        "batch_size": 12,
        "shards": 4,
    }
    return front_door.trainer(
        Small, loss, run_dir=run_dir, devices="cpu", workers=workers, **defaults | options
    )


class SecondsPass(quorate.Callback):
    """Lets more than a second pass on the clock with each update, and calls a function of steps."""

    def __init__(self, patch: pytest.MonkeyPatch, call: Callable[[int], object] = str) -> None:
        real, self.passed_s, self.call = time.monotonic, 0.0, call
        patch.setattr(time, "monotonic", lambda: real() + self.passed_s)

    def updated(self, report: quorate.Report) -> None:
        self.passed_s += 1.1
        self.call(report.global_step)
