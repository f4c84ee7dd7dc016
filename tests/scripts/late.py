"""A script of which a worker reaches the loop late, or once more, maybe with another model.

    quorate run --devices cpu --workers 2 --run-dir DIR tests/scripts/late.py WHO HOW FOLDER

WHO: late (worker 1 waits until some updates are made), replaced (it is killed then).
HOW: same, amended (a callback changes what is no parameter), other (the late one's model differs in
what is no parameter), raises (its loss does).
Prints a line of JSON: the digest.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.replica.digest import digest
from quorate.transports.processes import transport
from quorate.transports.processes.worker import here

who, how, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
transport.GATHER_S = 0.0  # the first one does not wait
go = folder / "go"  # is there when some updates are made
worker = here()
is_late = False
if worker is not None and worker.number == 1:
    while who == "late" and not go.exists():
        time.sleep(0.01)
    is_late = go.exists()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.scale = 1.5 if how == "other" and is_late else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.norm(self.first(x)), 0.2, self.training)
        return self.last(x) * self.scale


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    if how == "raises" and is_late:
        raise ZeroDivisionError("in the late one alone")
    if worker is not None:
        time.sleep(0.01)
    return model(batch[0]).square().mean()


class Goes(quorate.Callback):
    def __init__(self) -> None:
        self.pids: set[int | None] = set()

    def updated(self, report: quorate.Report) -> None:
        if how == "amended" and report.global_step in (2, 100):
            trainer.model.scale = 1.0 + report.global_step / 100
        if who == "never":
            return
        workers = trainer.workers
        if who == "late" and report.global_step == 3:
            go.touch()
        if who == "replaced" and report.global_step >= 3 and not go.exists():
            if workers[1].phase == "starting":
                return
            go.touch()
            os.kill(workers[1].pid or 0, signal.SIGKILL)
        # The run goes on until the late one is there.
        while report.global_step == 200 and how in ("other", "raises"):
            time.sleep(0.01)
            trainer.evaluate(data)


torch.manual_seed(0)
trainer = quorate.Trainer(
    Net(),
    loss,
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
    batch_size=16,
    shards=2,
)
data = TensorDataset(torch.randn(64, 6, generator=torch.Generator().manual_seed(0)))
trainer.fit(data, steps=201, callbacks=[Goes()])
print(json.dumps({"digest": digest(trainer.model.state_dict().items())}))
