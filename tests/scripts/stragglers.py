"""Shards that sleep, on three workers of which the last is slow, then stopped, then gone.

    quorate run --devices cpu --workers 3 tests/scripts/stragglers.py

It is let go on only when updates were made without it. Prints a line of JSON: the digest, and the
seconds between updates in each part of the run.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.replica.digest import digest
from quorate.transports.processes.transport import Processes
from quorate.transports.processes.worker import here

BATCH, SHARDS, SHARD_S = 16, 8, 0.08
# part -> its steps; the first one waits until all workers are there.
PARTS = {
    "warm": range(0, 6),
    "slow": range(6, 16),
    "stopped": range(16, 23),
    "gone": range(23, 32),
}
STEPS = PARTS["gone"].stop
WITHOUT = 4  # updates


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    rows, x = batch
    if (worker := here()) is not None:
        slow = worker.number == 2 and int(rows[0]) // BATCH in PARTS["slow"]
        time.sleep(SHARD_S * (10 if slow else 1))
    return model(x).square().mean()


if __name__ == "__main__":
    rows = STEPS * BATCH
    trainer = quorate.Trainer(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1)),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-2),
        batch_size=BATCH,
        shards=SHARDS,
    )
    data = torch.randn(rows, 6, generator=torch.Generator().manual_seed(0))
    times_s: dict[str, list[float]] = {part: [] for part in PARTS}
    last = time.monotonic()
    for update in trainer.updates(TensorDataset(torch.arange(rows), data), shuffle=False):
        now = time.monotonic()
        step = update.global_step - 1
        times_s[next(part for part, steps in PARTS.items() if step in steps)].append(now - last)
        crew = trainer._loop.transport
        if isinstance(crew, Processes) and (pid := trainer.workers[2].pid) is not None:
            if step + 1 == PARTS["stopped"].start:
                # In the middle of a shard, and then of a step.
                threading.Timer(SHARD_S / 2, os.kill, (pid, signal.SIGSTOP)).start()
            if step + 1 == PARTS["stopped"].start + WITHOUT:
                os.kill(pid, signal.SIGCONT)
            if step + 1 == PARTS["gone"].start:
                crew.members[2].restarts.killed = 0
                os.kill(pid, signal.SIGKILL)
        last = time.monotonic()
    print(json.dumps({"digest": digest(trainer.model.state_dict().items()), "times_s": times_s}))
