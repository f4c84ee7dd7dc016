"""A script with a fault that makes bits differ, or none, by the argument.

    quorate verify tests/scripts/verified.py -- clock

clock, generator, memory, kernel, loss: a shard differs each time.
process: a number depends on the process. collate: batches are turned. asked: rows depend on the
number of their loads. rank: row 17 is row 20 in worker processes.
callback: a callback changes parameters by the number of its calls, missing in checkpoints.
optimizer: state that nobody can save. rows: a resumed run has other rows.
rate: after three updates, the second optimizer's learning rate depends on the clock.
late: a number is read from a file that is written after two updates, in VERIFIED_FOLDER.
stage: once that file is there, the processes of stages compute something else.
"""

import itertools
import os
import sys
import time
from functools import partial
from multiprocessing import current_process
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, default_collate

import quorate

ROWS = 96


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, how: str) -> None:
        self.how = how
        self.x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(5))
        self.asked = 0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked += 1
        if self.how == "asked":
            row = self.asked % ROWS
        if self.how == "rank" and row == 17 and os.environ["VERIFIED_FIRST"] != str(os.getpid()):
            row = 20
        return self.x[row], (self.x[row].sum() > 0).long()


class Noise(nn.Module):
    number = 1.0

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.generator = torch.Generator().manual_seed(4) if how == "generator" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "clock":
            return x * (1 + time.perf_counter() % 1)
        if self.how == "generator":
            return x + torch.rand(x.shape, generator=self.generator)
        if self.how == "stage" and current_process().name.startswith("quorate-stage"):
            return x * 1.01 if late_file().exists() else x
        if self.how in ("process", "late"):
            return x * self.number
        if self.how == "memory":
            return x + torch.empty(8).nan_to_num(0, 0, 0).clamp(0, 1)
        if self.how == "kernel":
            return Lottery.apply(x)
        return x


class Lottery(torch.autograd.Function):
    """Stands for a kernel with additions in any order, as index_add does on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.verified.lottery(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def make_kernel() -> torch.library.Library:
    library, count = torch.library.Library("verified", "DEF"), itertools.count(1)
    library.define("lottery(Tensor x) -> Tensor")
    library.impl("lottery", lambda x: x * next(count), "CPU")
    return library


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


class Clock:
    steps = 0


class Warming(torch.optim.SGD):
    """Takes longer steps each time."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.clock = Clock()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.clock.steps += 1
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.grad *= self.clock.steps / 10
        super().step(closure)


batches = itertools.count()


def turned(rows: list[Any]) -> Any:
    """Collate a batch with another first row each time."""
    first = next(batches) % len(rows)
    return default_collate(rows[first:] + rows[:first])


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


if __name__ == "__main__":
    how = sys.argv[1]
    # The coordinator's number, also in the workers, by the inherited environment.
    os.environ.setdefault("VERIFIED_FIRST", str(os.getpid()))
    callbacks: list[quorate.Callback] = [Nudge()] if how == "callback" else []
    if how == "late":
        Noise.number = float(late_file().read_text()) if late_file().exists() else 1.0
    if how in ("late", "stage"):
        callbacks.append(Write(late_file()))
    if how == "process":
        Noise.number = 1 + os.getpid() % 1000 / 1000
    make: Any = partial(Warming if how == "optimizer" else torch.optim.SGD, lr=0.1)
    rate = partial(LambdaLR, lr_lambda=lambda n: time.perf_counter() if n == 3 else 1.0)
    library = make_kernel() if how == "kernel" else None
    trainer = quorate.Trainer(
        lambda: Net(how),
        loss,
        optimizer=[("first", make), ("*", make, rate)] if how == "rate" else make,
        loading=quorate.Loading(collate=turned if how == "collate" else None),
        batch_size=24,
        devices="cpu",
    )
    rows, folder = Rows(how), trainer.run_dir
    if how == "rows" and folder is not None and any(folder.glob("checkpoints/step-*")):
        rows.x *= 1.5
    trainer.fit(rows, epochs=3, callbacks=callbacks)
