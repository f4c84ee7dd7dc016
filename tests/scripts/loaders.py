"""Parents of loader processes are killed while these start.

    python tests/scripts/loaders.py COUNT SEED

A process that starts a feed with loader processes, COUNT times: it is killed in the middle of that.
Prints a line of JSON: how many of its loader processes there were when it was killed, each time,
and how long the last of them lived on.

    quorate run --devices cpu --workers 2 --loader-workers 2 tests/scripts/loaders.py COUNT SEED

A training loop whose workers are killed in the same way, COUNT times.
Prints a line of JSON: the digest, and how many were killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import quorate
from quorate.coordination.plan import Plan
from quorate.data.feed import Feed
from quorate.data.source import Source
from quorate.replica.digest import digest
from quorate.transports.processes.script import _running as run_by_quorate
from quorate.transports.processes.transport import Processes
from quorate.transports.processes.worker import here

count, seed = int(sys.argv[1]), int(sys.argv[2])
chance = random.Random(seed)


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> torch.Tensor:
        if here() is not None:
            time.sleep(0.002)
        return torch.randn(6) + row / 64


def children(pid: int) -> list[int]:
    """Of any thread: a worker's loader processes are children of its second one."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(n) for n in (task / "children").read_text().split()]
    return found


# --- a feed -------------------------------------------------------------------------------------


def feeds() -> None:
    """Orphans come to this process, which is their subreaper."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)
    source = Source(Noisy(), Plan(rows=64, batch_size=16, shards=4, seed=0))
    tickets = [(step, shard) for step in range(4) for shard in range(4)]
    loaders = []
    for _ in range(count):
        if (pid := os.fork()) == 0:
            feed = Feed(source, tickets, ahead=8, loader_workers=3)
            feed.take((0, 0))
            signal.pause()
        while not children(pid):
            time.sleep(0.0002)
        time.sleep(chance.uniform(0.0, 0.1))
        loaders.append(len(children(pid)))
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        while time.monotonic() < began + 60:
            try:
                os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:  # there is nobody left
                break
            time.sleep(0.001)
        else:
            sys.exit(f"left after 60 s: {children(os.getpid())}")
    print(json.dumps({"loaders": loaders}))


# --- a training loop ----------------------------------------------------------------------------


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def train() -> None:
    torch.manual_seed(0)
    trainer = quorate.Trainer(
        nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1)),
        loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
        batch_size=16,
        shards=4,
    )
    killed: list[int] = []
    over = threading.Event()

    def kill(transport: Processes) -> None:
        known: set[int] = set()
        while not over.wait(0.0005) and len(killed) < count:
            for status in transport.status():
                if status.pid is None or status.pid in known or not children(status.pid):
                    continue
                known.add(status.pid)
                time.sleep(chance.uniform(0.0, 0.05))
                with suppress(ProcessLookupError):
                    os.kill(status.pid, signal.SIGKILL)
                    killed.append(status.pid)

    killer: threading.Thread | None = None
    updates = 0
    with suppress(StopIteration):
        loop = trainer.updates(Noisy(), steps=40)
        while True:
            next(loop)
            updates += 1
            transport = trainer._loop.transport
            if killer is None and isinstance(transport, Processes):
                killer = threading.Thread(target=kill, args=(transport,))
                killer.start()
            # The last updates are made when all kills are.
            while updates == 30 and killer is not None and killer.is_alive():
                transport.pump(0.05)
    over.set()
    if killer is not None:
        killer.join()
    values = trainer.model.state_dict().items()
    print(json.dumps({"digest": digest(values), "killed": len(killed)}))


if run_by_quorate is not None:
    train()
else:
    feeds()
