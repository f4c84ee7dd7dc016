"""A training loop that lasts until it is told to end, while nodes and actors come and go.

    quorate run --engine ray --workers 1:3 --shards 4 tests/scripts/ray_nodes.py STOP 0

Arguments: a file that ends it, once it is there; how many random actors are to be killed, on this
machine, at random moments. It prints "N take part" whenever N changes, and at the end a line of
JSON: how many updates there were, their digest, the longest time from the notice that a worker had
left to the end of the update under way, who was killed. An update more or less changes no bit of
those before: a tower that makes as many has the same digest (``ray_kills.py none UPDATES 0``).
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.replica.digest import digest
from quorate.transports.processes.channel import ProcessesChannel
from quorate.transports.processes.member import State
from quorate.transports.processes.transport import Processes
from quorate.transports.processes.worker import here

stop, kills = Path(sys.argv[1]), int(sys.argv[2])
noticed_at: float | None = None
left = ProcessesChannel.left


def noticing(self: ProcessesChannel, worker: int, reason: str, *, crashed: bool) -> None:
    """Note when the coordinator hears that a worker is gone."""
    global noticed_at
    noticed_at = noticed_at or time.monotonic()
    left(self, worker, reason, crashed=crashed)


ProcessesChannel.left = noticing  # type: ignore[method-assign]


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    if here() is not None:
        time.sleep(0.01)
    return model(batch[0]).square().mean()


def joined() -> list[int]:
    transport = trainer._loop.transport
    assert isinstance(transport, Processes)
    return [m.number for m in transport.members if m.state is State.JOINED]


class Killer(threading.Thread):
    """Kills actors, whatever they are at: also the only one."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.killed: list[int] = []

    def run(self) -> None:
        chance = random.Random(17)
        while len(self.killed) < kills:
            time.sleep(chance.uniform(0.2, 2.0))
            pids = {s.number: s.pid for s in trainer._loop.transport.status()}
            able = [(n, pid) for n in joined() if (pid := pids[n]) is not None]
            if able:
                number, pid = chance.choice(able)
                os.kill(psutil.Process(pid).ppid(), signal.SIGKILL)
                self.killed.append(number)


torch.manual_seed(0)
trainer = quorate.Trainer(
    nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)),
    loss,
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
    batch_size=16,
    shards=4,
)
data = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
killer, there, recovered_s = Killer(), 0, 0.0
for update in trainer.updates(TensorDataset(data), steps=1_000_000):
    if noticed_at is not None:
        recovered_s = max(recovered_s, time.monotonic() - noticed_at)
        noticed_at = None
    if there != len(joined()):
        there = len(joined())
        print(f"{there} take part", flush=True)
    if update.global_step == 1 and kills:
        killer.start()
    if stop.exists() or (kills and not killer.is_alive() and there > 1):
        break
digest_ = digest(trainer.model.state_dict().items())
found = {"updates": update.global_step, "digest": digest_, "killed": killer.killed}
print(json.dumps({**found, "recovered_s": recovered_s}))
