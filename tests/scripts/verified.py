"""A script with one fault that makes bits differ, or none; the argument says which.

    quorate verify tests/scripts/verified.py -- clock

clock, state, generator, seed, part, memory, half, hook, loss: the same shard is another each time
it is computed. process: a number is what the process says.
asked: rows depend on how often they were asked for. given: they are others once they were given.
rank: row 17 is row 20 in worker processes.
callback: a callback changes parameters by how often it was called, which no checkpoint has.
late: a number is read from a file that is written after two updates, in VERIFIED_FOLDER.
stage: once that file is there, the processes of stages compute something else.
"""

from __future__ import annotations

import itertools
import os
import random
import secrets
import sys
import time
from multiprocessing import current_process
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import quorate

ROWS = 96


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, how: str) -> None:
        self.how = how
        self.x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(5))
        self.asked = 0
        self.given: set[int] = set()

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked += 1
        if self.how == "asked":
            row = self.asked % ROWS
        if self.how == "given" and row in self.given:
            return self.x[row].flip(0), (self.x[row].sum() > 0).long()
        self.given.add(row)
        if self.how == "rank" and row == 17 and os.environ["VERIFIED_FIRST"] != str(os.getpid()):
            row = 20
        return self.x[row], (self.x[row].sum() > 0).long()


class Noise(nn.Module):
    number = 1.0

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.random = random.Random(4)
        self.count = itertools.count()
        self.generator = torch.Generator().manual_seed(4) if how == "generator" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "clock":
            return x * (1 + time.perf_counter() % 1)
        if self.how == "state":
            return x * self.random.random()
        if self.how == "generator":
            return x + torch.rand(x.shape, generator=self.generator)
        if self.how == "seed":
            torch.manual_seed(secrets.randbits(32))
            return x + torch.randn_like(x)
        if self.how == "part":
            mask = torch.ones(8)
            mask[next(self.count)] = 0
            return x * mask
        if self.how == "half":
            out = torch.empty_like(x)
            out[:, :4] = x[:, :4]
            return x + out
        if self.how == "stage" and current_process().name.startswith("quorate-stage"):
            return x * 1.01 if late_file().exists() else x
        if self.how in ("process", "late"):
            return x * self.number
        if self.how == "memory":
            return x + torch.empty(8)
        if self.how == "hook":
            x = x.clone()
            x.register_hook(lambda gradient: gradient * (1 + time.perf_counter() % 1))
        return x


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.noise = Noise(how)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.3)
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(F.relu(self.norm(self.noise(self.first(x))))))


def loss(model: Any, batch: Any) -> torch.Tensor:
    found = F.cross_entropy(model(batch[0]), batch[1])
    return found * (1 + time.perf_counter() % 1) if model.noise.how == "loss" else found


class Nudge(quorate.Callback):
    """Adds to the weights of the last layer, each time more."""

    def __init__(self) -> None:
        self.calls = 0

    def started(self, trainer: Any) -> None:
        self.model = trainer.model

    def updated(self, report: Any) -> None:
        self.calls += 1
        with torch.no_grad():
            self.model.last.weight.add_(0.001 * self.calls)


def late_file() -> Path:
    return Path(os.environ["VERIFIED_FOLDER"], os.environ["VERIFIED_FIRST"])


class Write(quorate.Callback):
    """Writes a file after two updates."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def updated(self, report: Any) -> None:
        if report.global_step == 2:
            self.file.write_text("1.01")


def trainer(how: str, **options: Any) -> quorate.Trainer:
    return quorate.Trainer(
        lambda: Net(how),
        loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=24,
        devices="cpu",
        **options,
    )


if __name__ == "__main__":
    how = sys.argv[1]
    # The coordinator's number, also in the workers, which have its environment.
    os.environ.setdefault("VERIFIED_FIRST", str(os.getpid()))
    callbacks: list[quorate.Callback] = [Nudge()] if how == "callback" else []
    if how == "late":
        Noise.number = float(late_file().read_text()) if late_file().exists() else 1.0
    if how in ("late", "stage"):
        callbacks.append(Write(late_file()))
    trainer(how).fit(Rows(how), epochs=3, callbacks=callbacks)
