"""A training loop of which a worker process is stopped (SIGSTOP), and stays so.

    quorate run --devices cpu --workers 2 tests/scripts/stopped.py MOMENT EVALUATIONS

Moments: never; evaluations (after the first update, then so many evaluations and 9 updates more);
lost (likewise, with evaluations until another worker is in its place); joining (before it has
reached the loop); shard (while it computes one); server (the fork server is stopped, and a worker
killed); end (all workers, in the last update).
Prints a line of JSON: the digest, the mean loss of each evaluation, and how many workers were
stopped.
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
from quorate.replica.digest import digest
from quorate.transports.processes.starter import ForkServer
from quorate.transports.processes.transport import Processes
from quorate.transports.processes.worker import here

moment, evaluations = sys.argv[1], int(sys.argv[2])
UPDATES = 10
worker = here()
if moment == "joining" and worker is not None and worker.number == 1:
    os.kill(os.getpid(), signal.SIGSTOP)


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    if worker is not None and worker.number == 1 and moment == "shard" and model.training:
        os.kill(os.getpid(), signal.SIGSTOP)
    return model(batch[0]).square().mean()


torch.manual_seed(0)
trainer = quorate.Trainer(
    nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1)),
    loss,
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
    batch_size=16,
    shards=2,
)
data = TensorDataset(torch.randn(16, 6, generator=torch.Generator().manual_seed(0)))
stopped: set[int] = set()


def stop(pids: list[int | None]) -> None:
    for pid in pids:
        if pid is not None:
            os.kill(pid, signal.SIGSTOP)
            stopped.add(pid)


losses: list[float] = []
for update in trainer.updates(data, steps=UPDATES):
    transport = trainer._loop.transport
    assert isinstance(transport, Processes) or moment == "never"
    if update.global_step == 1:
        if moment in ("evaluations", "lost"):
            while transport.status()[1].phase != "waiting":  # it has joined
                trainer.evaluate(data)
                time.sleep(0.01)
            stop([pid := transport.status()[1].pid])
            while moment == "lost" and transport.status()[1].pid in (None, pid):
                losses.append(trainer.evaluate(data)["loss"])
        if moment == "server":
            assert isinstance(transport._site._starter, ForkServer)
            stop([transport._site._starter._server.process.pid])
            os.kill(transport.status()[1].pid, signal.SIGKILL)
        losses += [trainer.evaluate(data)["loss"] for _ in range(evaluations)]
    if moment == "end" and update.global_step == UPDATES:
        stop([status.pid for status in transport.status()])
print(
    json.dumps(
        {
            "digest": digest(trainer.model.state_dict().items()),
            "losses": sorted(set(losses)),
            "stopped": len(stopped),
        }
    )
)
