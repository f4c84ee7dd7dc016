"""Predictions by worker processes: before a loop, in it and after it, perhaps with a kill.

    quorate run tests/scripts/predicted.py FOLDER [killed]

Prints the checksums of what was predicted as JSON. "killed": a worker kills itself in the middle of
a prediction, once.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate

FOLDER, WHAT = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
X = torch.randn(160, 6, generator=torch.Generator().manual_seed(0))
DATA, OTHER = TensorDataset(X, X.sum(1, keepdim=True)), TensorDataset(X[:110], X[:110, :1])
COORDINATOR = os.environ.setdefault("PREDICTED_BY", str(os.getpid()))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.dropout(self.norm(self.first(x)).relu(), 0.3, self.training))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def outputs(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
    x = batch[0]
    is_killed = WHAT == "killed" and bool((x[:, 0] == X[60, 0]).any())
    if is_killed and str(os.getpid()) != COORDINATOR:
        try:
            (FOLDER / "killed").touch(exist_ok=False)
        except FileExistsError:
            pass
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    y = model(x)
    return {
        "y": y,
        "long": x.repeat(1, 2000),
        "rows": [row[: i % 3 + 1] for i, row in enumerate(x)],
        "kinds": (y.bfloat16(), x > 0, x[:, :0], torch.complex(x, x), x.mT.contiguous().mT),
        "odd": [{"n": i % 2, "x": row[:2].to(torch.uint8), "t": "text"} for i, row in enumerate(x)],
    }


def in_files(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
    return {
        name: value for name, value in outputs(model, batch).items() if name in ("long", "rows")
    }


def print_of(value: Any) -> str:
    """Return a checksum of all that outputs hold."""
    if isinstance(value, torch.Tensor):
        real = torch.view_as_real(value) if value.is_complex() else value
        content = real.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        value = [str(value.dtype), [*value.shape], hashlib.sha256(content).hexdigest()]
    elif isinstance(value, dict):
        value = {name: print_of(each) for name, each in value.items()}
    elif isinstance(value, list | tuple):
        value = [type(value).__name__, *map(print_of, value)]
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


class Looks(quorate.Callback):
    def started(self, trainer: Any) -> None:
        self._trainer = trainer
        self.prints: list[str] = []

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        predicted = self._trainer.predict(OTHER, outputs)
        self.prints.append(print_of(predicted))
        y = self._trainer.predict(OTHER, lambda model, batch: model(batch[0]))  # by no name
        assert torch.equal(y, predicted["y"])
        folder = self._trainer.predict(OTHER, in_files, to=FOLDER / f"step-{global_step}")
        assert np.array_equal(np.load(folder / "long.npy"), predicted["long"].numpy())


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    trainer = quorate.Trainer(
        Model,
        loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=0.01),
        batch_size=24,
        shards=4,
    )
    looks = Looks()
    before = print_of(trainer.predict(OTHER, outputs))
    validation = quorate.Validation(OTHER, every_steps=4)
    trainer.fit(DATA, steps=8, validation=validation, callbacks=[looks])
    prints = [before, *looks.prints, print_of(trainer.predict(OTHER, outputs))]
    print(json.dumps(prints))


main()
