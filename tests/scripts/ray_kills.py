"""A training loop that kills workers of a local Ray cluster, or the actors that have them.

    quorate run --devices cpu --engine ray --workers 2 tests/scripts/ray_kills.py actor 120 3

Arguments: none, worker or actor (who is killed); updates; kills. Prints a line with the word
"begun" after a third of the updates, and a line of JSON at the end: the digest, who was killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import psutil
import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.replica.digest import digest
from quorate.transports.processes.member import State
from quorate.transports.processes.transport import Processes
from quorate.transports.processes.worker import here

how, updates, kills = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    if here() is not None:
        time.sleep(0.01)
    return model(batch[0]).square().mean()


torch.manual_seed(0)
trainer = quorate.Trainer(
    nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)),
    loss,
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
    batch_size=16,
    shards=4,
)
data = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
killed: list[int] = []
for update in trainer.updates(TensorDataset(data), steps=updates):
    n = update.global_step
    if n == updates // 3:
        print("begun", flush=True)
    transport = trainer._loop.transport
    if how == "none" or not isinstance(transport, Processes):
        continue
    joined = {m.number for m in transport.members if m.state is State.JOINED}
    able = [s for s in transport.status() if s.number in joined and s.pid is not None]
    if killed and len(able) < 2:
        time.sleep(0.5)  # an actor takes seconds to start, and tens of them on a busy machine
    if len(killed) < kills and len(able) > 1 and n >= (1 + len(killed)) * updates // (kills + 2):
        victim = able[len(killed) % len(able)]
        pid = victim.pid if how == "worker" else psutil.Process(victim.pid).ppid()
        os.kill(pid, signal.SIGKILL)
        killed.append(victim.number)
print(json.dumps({"digest": digest(trainer.model.state_dict().items()), "killed": killed}))
