"""A training whose callback changes the model by every means there is, between two updates.

    quorate run --devices cpu --workers 2 --run-dir RUN tests/scripts/user_changes.py STEPS

Prints the values that the model and its optimizer have in the end. ``change`` is what a loop of
plain torch does too, in the test.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate

ROWS, BATCH, FEATURES = 48, 12, 6


class Student(nn.Module):
    """A linear map whose target is partly a frozen teacher's, with buffers and a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 5)
        self.last = nn.Linear(5, 1)
        self.teacher = nn.Linear(FEATURES, 1).requires_grad_(False)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("table", torch.zeros(FEATURES), persistent=False)
        self.beta = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.table
        own = self.last(torch.tanh(self.first(x))) * self.scale
        return own - self.beta * self.teacher(x) - 0.01 * self.count


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, FEATURES, generator=draw, dtype=torch.float64)
    return TensorDataset(x, torch.randn(ROWS, 1, generator=draw, dtype=torch.float64))


def made() -> Student:
    torch.manual_seed(0)
    return Student().double()


def change(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Change something else after each update."""
    n = step % 12
    with torch.no_grad():
        if n == 1:
            model.first.weight.data = model.first.weight.data.clamp(-0.3, 0.3)
        elif n == 2:
            model.teacher.weight.data.mul_(0.9)
            model.teacher.bias.data = model.teacher.bias.data + 0.1
        elif n == 3:
            model.scale.fill_(1.5)
            model.count.add_(2)
        elif n == 4:
            model.scale = torch.full((1,), 0.75, dtype=torch.float64)
            model.table = torch.linspace(-1, 1, FEATURES, dtype=torch.float64)
        elif n == 5:
            optimizer.param_groups[0]["lr"] = 0.02
        elif n == 6:
            model.beta = 0.25
        elif n == 7:
            values = {k: v * 0.5 for k, v in model.state_dict().items() if v.is_floating_point()}
            model.load_state_dict(values, strict=False)
        elif n == 8:
            flat = nn.utils.parameters_to_vector(model.last.parameters())
            nn.utils.vector_to_parameters(flat + 0.1, model.last.parameters())
        elif n == 9:
            # Of other strides.
            model.first.weight.data = model.first.weight.data.t().contiguous().t()
            model.teacher.weight.copy_(model.teacher.weight + 0.2)
        elif n == 10:
            model.table.data = model.table.data.flip(0)
            optimizer.param_groups[0]["momentum"] = 0.5


class Changes(quorate.Callback):
    """Changes the model after each update; kills a worker now and then, if told to."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], kills: int) -> None:
        self.optimizers, self.kills = optimizers, kills

    def started(self, trainer: Any) -> None:
        self.trainer = trainer
        if trainer.global_step == 0:
            trainer.model.teacher.weight.data = trainer.model.teacher.weight.data * 2

    def updated(self, report: Any) -> None:
        change(self.trainer.model, self.optimizers[-1], report.global_step)
        if report.global_step == self.kills:
            pids = [worker.pid for worker in self.trainer.workers if worker.pid]
            os.kill(pids[0], signal.SIGKILL)


def values_of(model: Any) -> dict[str, Any]:
    values = {name: value.tolist() for name, value in model.state_dict().items()}
    return {**values, "table": model.table.tolist(), "beta": model.beta}


def trained(steps: int, kills: int = -1, **settings: Any) -> dict[str, Any]:
    optimizers: list[torch.optim.Optimizer] = []

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizers.append(torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
        return optimizers[-1]

    trainer = quorate.Trainer(
        made(),
        lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=optimizer,
        batch_size=BATCH,
        shards=3,
        **settings,
    )
    trainer.fit(dataset(), steps=steps, shuffle=False, callbacks=[Changes(optimizers, kills)])
    return values_of(trainer.model)


if __name__ == "__main__":
    print(json.dumps(trained(*map(int, sys.argv[1:]))))
