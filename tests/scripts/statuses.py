"""A run on two workers whose shards sleep; the second one is killed and comes back.

    quorate run --devices cpu --workers 2 tests/scripts/statuses.py

Prints a line of JSON. "taken": statuses of both workers from when both have started, taken in the
loop, as [seconds on the clock, status, status]. "seen": what a thread saw of the second one
meanwhile, as [phase, whether it is gone], each once.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.transports.worker_status import WorkerStatus

FORWARD_S, BACKWARD_S = 0.02, 0.01
SHARDS = 6  # of each worker before the kill, and of the life after it


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD_S)
        return grad


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    found: torch.Tensor = Slow.apply(model(batch[0])).square().mean()
    return found


def watch() -> None:
    while not over.is_set():
        if statuses := trainer.workers:
            second = statuses[1]
            if (state := [second.phase, second.is_gone]) not in seen:
                seen.append(state)
        time.sleep(0.001)


trainer = quorate.Trainer(
    lambda: nn.Linear(3, 1),
    loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
    batch_size=8,
    shards=4,
)
seen: list[list[Any]] = []
taken: list[tuple[float, WorkerStatus, WorkerStatus]] = []
over = threading.Event()
watcher = threading.Thread(target=watch)
killed: WorkerStatus | None = None
for _update in trainer.updates(TensorDataset(torch.ones(16, 3)), steps=10_000):
    first, second = trainer.workers
    if not taken and "starting" in (first.phase, second.phase):
        continue
    taken.append((time.monotonic(), first, second))
    if not watcher.is_alive():
        watcher.start()
    if killed is None and min(first.shards, second.shards) >= SHARDS:
        killed = second
        os.kill(second.pid, signal.SIGKILL)
    is_another = killed is not None and second.pid not in (None, killed.pid)
    if is_another and second.shards >= killed.shards + SHARDS:
        break
over.set()
watcher.join()
print(
    json.dumps({"taken": [(at, *(s._asdict() for s in pair)) for at, *pair in taken], "seen": seen})
)
