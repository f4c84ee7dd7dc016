"""Rows that make a gradient infinite. Run by ``quorate run``; prints a line of JSON at the end.

not_finite.py UPDATE NONFINITE STEPS
"""

from __future__ import annotations

import json
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.replica.digest import digest

ROWS, BAD = 48, (21, 30)


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Finite, with a gradient that is not where a row is bad: the slope of a root at zero."""
    x, bad = batch
    y = model(x)
    return y.square().mean() + (y * 0.0 * bad + (1 - bad)).sqrt().sum() * 1e-3


if __name__ == "__main__":
    generator = torch.Generator().manual_seed(0)
    bad = torch.zeros(ROWS, 1)
    bad[list(BAD)] = 1.0
    trainer = quorate.Trainer(
        lambda: nn.Linear(3, 2),
        loss,
        optimizer=quorate.Optimize(
            lambda params: torch.optim.SGD(params, lr=0.01), nonfinite=sys.argv[2]
        ),
        batch_size=8,
        shards=4,
        update=sys.argv[1],
    )
    trainer.fit(
        TensorDataset(torch.randn(ROWS, 3, generator=generator), bad),
        steps=int(sys.argv[3]),
        shuffle=False,
    )
    found = dict(trainer.model.state_dict())
    finite = all(bool(value.isfinite().all()) for value in found.values())
    print(json.dumps({"digest": digest(found.items()), "finite": finite}))
