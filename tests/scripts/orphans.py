"""A training loop that kills the fork server of its workers, or one of them.

    quorate run --devices cpu --workers 2 tests/scripts/orphans.py server 30

Arguments: none, server (it is killed), or alone (there is none, and a worker is killed); updates.
Prints a line of JSON: the digest, and how many workers were killed.
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
from quorate.transports.processes import starter
from quorate.transports.processes.member import State
from quorate.transports.processes.transport import Processes
from quorate.transports.processes.worker import here

how, updates = sys.argv[1], int(sys.argv[2])
if how == "alone":
    starter.can_fork = lambda: False


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    if here() is not None:
        time.sleep(0.01)
    return model(batch[0]).square().mean()


torch.manual_seed(0)
trainer = quorate.Trainer(
    nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1)),
    loss,
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
    batch_size=16,
    shards=4,
)
data = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
killed = 0
for update in trainer.updates(TensorDataset(data), steps=updates):
    transport = trainer._loop.transport
    if how == "none" or not isinstance(transport, Processes):
        continue
    joined = {m.number for m in transport.members if m.state is State.JOINED}
    able = [status.pid for status in transport.status() if status.number in joined]
    if not killed and len(able) == 2 and update.global_step >= updates // 3:
        used = transport._site._starter
        forked = isinstance(used, starter.ForkServer)
        killed = 2 if forked else 1
        os.kill(used._server.process.pid if forked else able[0], signal.SIGKILL)
print(json.dumps({"digest": digest(trainer.model.state_dict().items()), "killed": killed}))
