"""A parabola over forty rows, and a line fitted to the parabola: tests of the choice of rows."""

from pathlib import Path
from typing import Any

import torch
from support import front_door
from torch.utils.data import TensorDataset

import quorate

X = torch.arange(40.0)[:, None]
DATA = TensorDataset(X, X**2 / 100)


def trainer(run_dir: Path | None = None, workers: int = 1, **options: Any) -> quorate.Trainer:
    """Return a trainer of a line, 12 rows in three shards; an epoch's last batch is of fewer."""
    return front_door.trainer(
        lambda: torch.nn.Linear(1, 1),
        lambda model, batch: (model(batch[0] / 40) - batch[1]).square().mean(),
        optimizer=lambda params: torch.optim.Adam(params, lr=0.01),
        batch_size=12,
        shards=3,
        devices="cpu",
        workers=workers,
        run_dir=run_dir,
        **options,
    )
