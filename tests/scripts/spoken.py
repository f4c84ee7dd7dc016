"""A small training that prints a lot, and whose output is spoiled under way, in each process.

    quorate run tests/scripts/spoken.py HOW STEP [BOTH]

HOW: "full" from STEP on; "left" as it is, for whoever reads it to leave. With BOTH, standard error
too.
"""

from __future__ import annotations

import os
import sys
from functools import cache

import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate

how, at, names = sys.argv[1], int(sys.argv[2]), ["stdout", "stderr"][: len(sys.argv) - 2]
BATCH, STEPS = 8, 60


@cache  # once in a process
def spoil() -> None:
    for name in names:
        if how == "full":
            full = os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, getattr(sys, name).fileno())
            os.close(full)


def speak(step: int) -> None:
    if step >= at:
        spoil()
    for name in names:
        # Some of it stays in the buffer, and some overflows it.
        print("a loss", step, "." * 300, file=getattr(sys, name), flush=step % 3 == 0)


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    rows, x = batch
    speak(int(rows[0]) // BATCH)
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


class Speaks(quorate.Callback):
    def updated(self, report: quorate.Report) -> None:
        speak(report.global_step)


torch.manual_seed(0)
rows = torch.arange(BATCH * STEPS)
x = torch.randn(len(rows), 6, generator=torch.Generator().manual_seed(0))
trainer = quorate.Trainer(
    nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1)),
    loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    batch_size=BATCH,
    shards=4,
)
trainer.fit(TensorDataset(rows, x), shuffle=False, callbacks=[Speaks()])
print("after fit")
