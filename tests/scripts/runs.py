"""A training loop whose shards are dealt in long runs, whose workers are killed or stopped in them.

    quorate run --devices cpu --workers 2 tests/scripts/runs.py kill 60 5

Arguments: none, kill or stop (what happens to workers); updates; how often. The last line is JSON:
the digest, runs of several shards that were dealt, and whom it happened to.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.coordination.dealing import Dealing
from quorate.replica.digest import digest
from quorate.training import loop
from quorate.transports.processes.worker import here

how, updates, times = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
loop.RUN_S = 10.0  # not of short shards alone
dealt: list[int] = []
give = Dealing._give


def counted(self, *arguments, **options):  # type: ignore[no-untyped-def]
    effect = give(self, *arguments, **options)
    dealt.append(effect.count)
    return effect


Dealing._give = counted  # type: ignore[method-assign]


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    if here() is not None and how != "none":
        time.sleep(0.005)
    return model(batch[0]).square().mean()


torch.manual_seed(0)
trainer = quorate.Trainer(
    nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)),
    loss,
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
    batch_size=32,
    shards=8,
)
data = torch.randn(128, 6, generator=torch.Generator().manual_seed(0))
hit: list[int] = []


def strike(pid: int) -> None:
    """In the middle of a run: a step takes some 20 ms."""
    time.sleep(0.003 + 0.002 * len(hit))
    os.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    if how == "stop":
        time.sleep(0.3)
        os.kill(pid, signal.SIGCONT)


threads = []
for update in trainer.updates(TensorDataset(data), steps=updates):
    n = update.global_step
    able = [s for s in trainer._loop.transport.status() if s.pid not in (None, os.getpid())]
    due = (1 + len(hit)) * updates // (times + 2)
    if how != "none" and len(hit) < times and len(able) > 1 and n >= due:
        victim = able[len(hit) % len(able)]
        threads.append(threading.Thread(target=strike, args=(victim.pid,)))
        threads[-1].start()
        hit.append(victim.number)
for thread in threads:
    thread.join()
runs = sum(count > 1 for count in dealt)
found = digest(trainer.model.state_dict().items())
print(json.dumps({"digest": found, "runs": runs, "hit": hit, "updates": updates}))
