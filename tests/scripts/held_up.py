"""A run under bounded:2 that an evaluation in its loop, or a stopped worker, holds up for long.

    quorate run --devices cpu --workers 2 tests/scripts/held_up.py evaluate | stop

Prints a line of JSON: the updates that were made.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate

TIMEOUT_S = 5.0  # a start takes 3


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    time.sleep(0.02 if model.training else 0.16)
    return model(batch[0]).square().mean()


if __name__ == "__main__":
    what = sys.argv[1]
    trainer = quorate.Trainer(
        lambda: nn.Linear(3, 1),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
        batch_size=4,
        shards=4,
        update="bounded:2",
        workers=quorate.Workers(timeout_s=TIMEOUT_S),
    )
    data, more = TensorDataset(torch.ones(40, 3)), TensorDataset(torch.ones(80, 3))
    for report in trainer.updates(data, steps=40):
        if report.global_step == 10 and what == "evaluate":
            began = time.monotonic()
            trainer.evaluate(more)
            assert time.monotonic() - began > TIMEOUT_S
        if report.global_step == 10 and what == "stop":
            pid = trainer.workers[1].pid
            assert pid is not None  # it is a process
            os.kill(pid, signal.SIGSTOP)
    print(json.dumps({"steps": trainer.global_step}))
