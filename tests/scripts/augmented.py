"""Augmented batches; what is validated is what is trained on, in the same order."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate

parser = argparse.ArgumentParser()
parser.add_argument("--loader-workers", type=int, default=0)
parser.add_argument("--other", action="store_true", help="each process augments in another way")
options = parser.parse_args()

STRENGTH = os.getpid() % 1000 + 1 if options.other else 1


def augment(batch: list[torch.Tensor], draws: Any) -> list[torch.Tensor]:
    """Noise; to be the same in every process."""
    return [batch[0] + STRENGTH * draws.uniform(4)]


rows = torch.arange(160.0).reshape(40, 4) / 160
data = TensorDataset(rows)
trainer = quorate.Trainer(
    lambda: nn.Linear(4, 1),
    lambda model, batch: model(batch[0]).square().mean(),
    optimizer=torch.optim.Adam,
    batch_size=8,
    shards=4,
    loading=quorate.Loading(augment=augment, processes=options.loader_workers),
)
trainer.fit(data, epochs=2, validation=data, shuffle=False)
