"""A training with a validation set that kills its own worker and itself.

    quorate run --devices cpu --workers 2 tests/scripts/reported.py 60 15 35

Arguments: updates; after which of them worker 1 is killed, in the middle of a shard; after which
the run is killed, unless it was resumed. 0: after none.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.training.callbacks import Run


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad


def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    error = (Slow.apply(model(batch[0])) - batch[1]).square().mean()
    return {"loss": error, "absolute": error.sqrt()}


def rows(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True))


def kill_worker(step: int) -> None:
    """Kill worker 1 when it computes a shard of a step, or of a later one."""
    while True:
        worker = trainer.workers[1]
        if worker.phase == "forward" and worker.step >= step and worker.pid is not None:
            os.kill(worker.pid, signal.SIGKILL)
            return
        time.sleep(0.001)


class Kills(quorate.Callback):
    begun_at = 0  # updates

    def started(self, trainer: Run) -> None:
        self.begun_at = trainer.global_step

    def updated(self, report: quorate.Report) -> None:
        if report.global_step == worker_after and self.begun_at == 0:
            threading.Thread(target=kill_worker, args=(report.global_step,)).start()
        if report.global_step == run_after and self.begun_at == 0:
            os.kill(os.getpid(), signal.SIGKILL)


updates, worker_after, run_after = map(int, sys.argv[1:])
trainer = quorate.Trainer(
    lambda: nn.Linear(6, 1),
    loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
    batch_size=16,
    shards=4,
)
trainer.fit(rows(320, 0), steps=updates, validation=rows(32, 1), callbacks=[Kills()])
