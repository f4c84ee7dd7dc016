"""Loops of one's own, that are left, held or killed; the argument says which.

    quorate run --devices cpu --workers 2 tests/scripts/loops.py leave

leave: loop after loop, some left before workers are there. Prints descriptors and children.
hold: says "holding" with a report in hand, and waits for ever.
compute: says "computing" after two updates, and goes on for ever, with slow shards.
start: says "starting" as soon as workers are being started.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import quorate
from quorate.transports.processes.worker import here

what = sys.argv[1]
times = int(sys.argv[2]) if len(sys.argv) > 2 else 6


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 80_000

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.full((3,), float(row))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    if what == "compute" and here() is not None:
        time.sleep(0.3)
    return model(batch).square().mean()


def held() -> dict[str, int]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {"files": len(list(Path("/proc/self/fd").iterdir())), "children": len(children)}


trainer = quorate.Trainer(
    nn.Linear(3, 1),
    loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=1e-12),
    batch_size=8,
    shards=4,
    loading=quorate.Loading(processes=0 if what == "leave" else 1),
)
data = Rows()
if what == "leave":
    found = []
    for loop in range(times):
        if loop % 2:  # stopped while workers start
            threading.Timer(0.2 * (loop % 12), trainer.stop).start()
            for _ in trainer.updates(data, steps=10_000):
                pass
        else:
            for _ in trainer.updates(data, steps=10_000):
                break
        found.append(held())
    print(json.dumps(found))
else:
    if what == "start":
        print("starting", flush=True)
    begun = 0.0
    for update in trainer.updates(data, steps=10_000):
        begun = begun or time.monotonic()
        # By then all workers have computed something.
        if what == "hold" and time.monotonic() - begun > 1.5:
            print("holding", flush=True)
            time.sleep(1000)
        if update.global_step == 2:
            print("computing", flush=True)
