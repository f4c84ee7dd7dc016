"""Loops of one's own, that are left, blocked or killed; the argument says which.

    quorate run --devices cpu --workers 2 tests/scripts/loops.py leave

leave: loop after loop, some left before workers are there. Prints descriptors and children.
start: says "starting" as soon as workers are being started.
end: says "computing" after two updates, and "to the end" some updates later.
stuck: says "stuck" after three updates, and hangs where no signal ends it and no handler is called.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate

what = sys.argv[1]


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    if what == "end":
        time.sleep(0.03)
    return model(batch[0]).square().mean()


class Speaks(quorate.Callback):
    def updated(self, report: quorate.Report) -> None:
        if report.global_step == 2:
            print("computing", flush=True)
        if report.global_step == 3 and what == "stuck":
            print("stuck", flush=True)
            libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
            for _ in range(2):
                libc.pthread_mutex_lock(mutex)


def held() -> dict[str, int]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {"files": len(list(Path("/proc/self/fd").iterdir())), "children": len(children)}


trainer = quorate.Trainer(
    nn.Linear(3, 1),
    loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=1e-12),
    batch_size=8,
    shards=4,
)
data = TensorDataset(torch.arange(240_000.0).reshape(-1, 3))
if what == "leave":
    found = []
    for loop in range(4):
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
    trainer.fit(data, steps=30 if what == "end" else 10_000, callbacks=[Speaks()])
    print("to the end")
