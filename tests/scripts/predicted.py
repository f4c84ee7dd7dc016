"""Predictions by worker processes: in a loop, before any loop, with a worker that is killed.

    quorate run tests/scripts/predicted.py FOLDER [first|killed]

Prints a line of JSON: the fingerprints of what was predicted in the loop and after it, and how many
processes did it. "first": the prediction is the first loop of the script. "killed": a worker kills
itself in the middle of one, once.
"""

from __future__ import annotations

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
from quorate.replica.fingerprint import fingerprint

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


def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
    found = model(batch[0])
    values: dict[str, Any] = {"loss": (found - batch[1]).square().mean()}
    return values if model.training else values | {"median": (found - batch[1]).abs()[:, 0]}


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
    }


def here(_: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return torch.full((len(batch[0]),), os.getpid())


class Looks(quorate.Callback):
    def __init__(self) -> None:
        self.prints: list[str] = []
        self.processes = 0

    def started(self, trainer: Any) -> None:
        self._trainer = trainer

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        predicted = self._trainer.predict(OTHER, outputs)
        self.prints.append(fingerprint(predicted))
        y = self._trainer.predict(OTHER, lambda model, batch: model(batch[0]))  # by no name
        assert torch.equal(y, predicted["y"])
        folder = self._trainer.predict(OTHER, outputs, to=FOLDER / f"step-{global_step}")
        assert np.array_equal(np.load(folder / "long.npy"), predicted["long"].numpy())
        assert len(predicted["rows"]) == len(OTHER)
        self.processes = max(self.processes, len(self._trainer.predict(OTHER, here).unique()))
        self.metrics = metrics


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    trainer = quorate.Trainer(
        Model,
        loss,
        totals={"median": quorate.Collect(torch.median)},
        optimizer=lambda params: torch.optim.Adam(params, lr=0.01),
        batch_size=24,
        shards=4,
        run_dir=FOLDER / "run",
    )
    looks = Looks()
    if WHAT == "first":
        predicted = trainer.predict(OTHER, outputs)
        looks.processes = int((trainer.predict(OTHER, here) != os.getpid()).any())
        print(json.dumps({"prints": [fingerprint(predicted)], "processes": looks.processes}))
        return
    trainer.fit(
        DATA, epochs=2, validation=quorate.Validation(OTHER, every_steps=4), callbacks=[looks]
    )
    found = {"prints": looks.prints, "processes": looks.processes, "metrics": looks.metrics}
    print(json.dumps(found | {"after": fingerprint(trainer.predict(OTHER, outputs))}))


main()
