"""A training loop that kills its own workers: a random one, at a random moment of every phase.

    quorate run --devices cpu --workers 3 tests/scripts/faults.py 25 300

Arguments: kills, updates. Prints a line of JSON: the digest, how often each phase was hit, the time
between updates in seconds, and the sum over each epoch of the numbers of its rows.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import quorate
from quorate.replica.digest import digest
from quorate.transports.processes.member import State
from quorate.transports.processes.transport import Processes

ROWS, BATCH = 300, 24
KILLS, STEPS = int(sys.argv[1]), int(sys.argv[2])
PAUSE_S = 0.03 if KILLS else 0.0


class Rows(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Rows that take a while to fetch, and draw."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        time.sleep(PAUSE_S / 40)
        x = torch.randn(32)
        return row, x, x.sum().sign()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.norm = nn.BatchNorm1d(64)
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.dropout(self.norm(self.first(x)).relu()))
        return y[:, 0]


class Slow(torch.autograd.Function):
    """So that a kill can meet the middle of forward and of backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(PAUSE_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(PAUSE_S)
        return grad


def loss(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    rows, x, y = batch
    error: torch.Tensor = (Slow.apply(model(x)) - y).square().mean()
    return {"loss": error, "row": rows.double().mean()}


class FaultPlan(threading.Thread):
    """Kills ``kills`` workers, each while it is in a phase of its choice and another one lives."""

    # One that starts is met after another was killed.
    PHASES = ("fetching", "starting", "forward", "backward", "pushing", "waiting")

    def __init__(self, transport: Processes, kills: int) -> None:
        super().__init__(daemon=True)
        self.hit: Counter[str] = Counter()
        self.last_hit_at = 0  # the step
        self._killed: set[int] = set()
        self._transport = transport
        self._chance = random.Random(7)
        self._wanted = [self.PHASES[i % len(self.PHASES)] for i in range(kills)]

    def run(self) -> None:
        while self._wanted:
            phase = self._wanted.pop(0)
            if phase != "starting":  # else it would be over: a start is a matter of a moment
                time.sleep(self._chance.uniform(0.0, 0.3))
            while not self._kill(phase):
                time.sleep(0.0002)
            self.hit[phase] += 1
            self.last_hit_at = trainer.global_step

    def _kill(self, phase: str) -> bool:
        pids = {status.number: status.pid for status in self._transport.status()}
        living = [n for n, pid in pids.items() if pid not in {None, *self._killed}]
        states = {n: self._transport.members[n].state for n in living}
        able = [n for n in living if states[n] is State.JOINED]
        self._chance.shuffle(living)
        for number in living:
            if states[number] is State.KILLED or (number in able and len(able) < 2):
                continue
            doing = self._transport.arena.doing(number).phase
            is_met = phase == "starting" if states[number] is State.STARTING else doing == phase
            if is_met and (pid := pids[number]) is not None:
                self._killed.add(pid)  # its end is noticed later
                os.kill(pid, signal.SIGKILL)
                return True
        return False


time.sleep(0.1)  # so that a kill can meet the start of a worker
torch.manual_seed(1)
trainer = quorate.Trainer(
    Net,
    loss,
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
    batch_size=BATCH,
    shards=6,
)
plan: FaultPlan | None = None
times: list[float] = []
sums: dict[int, float] = {}
last = 0.0
for update in trainer.updates(Rows(), steps=STEPS):
    now = time.monotonic()
    if last:
        times.append(now - last)
    last = now
    sums[update.epoch] = sums.get(update.epoch, 0.0) + update.metrics["row"] * update.rows
    if KILLS and plan is None:
        plan = FaultPlan(trainer._loop.transport, KILLS)  # type: ignore[arg-type]
        plan.start()
print(
    json.dumps(
        {
            "digest": digest(trainer.model.state_dict().items()),
            "hit": plan.hit if plan else {},
            "last_hit_at": plan.last_hit_at if plan else 0,
            "times_s": times,
            "row_sums": sums,
        }
    )
)
