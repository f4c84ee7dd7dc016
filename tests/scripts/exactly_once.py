"""A training that counts its rows, by uneven workers; some are killed, and the run is stopped.

    quorate run --devices cpu --workers 3 --shards 4 --update async --run-dir RUN \
        tests/scripts/exactly_once.py random 240 2 230 FOLDER

Arguments: how long shards take (random: up to 20 ms; slow: 3 s on the last worker; five: 20 ms, and
5 times as long on the last worker), updates, kills,
after how many updates the process is sent SIGTERM (0: not at all), and a folder, by which workers
wait for each other in their first shard.

Row r adds 16**(r % 11) to metric r // 11, so that the digits of the sums over up to 15 epochs say
how often each row was in an update. Prints a line of JSON: when the last update was made and when
``fit`` ended, in seconds since 1970, and who was killed.
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
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.transports.processes.member import State
from quorate.transports.processes.transport import Processes
from quorate.transports.processes.worker import here

ROWS, BATCH = 44, 8  # the last batch has 4 rows
DIGITS = 11
SLOW_S = 3.0
pattern = sys.argv[1]
steps, kills, stop_at, folder = (*map(int, sys.argv[2:5]), Path(sys.argv[5]))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    x, row = batch
    if (worker := here()) is not None:
        wait_for_all(worker.number)
        is_last = worker.number == WORKERS - 1
        if pattern == "five":
            time.sleep(0.1 if is_last else 0.02)
        else:
            is_slow = pattern == "slow" and is_last
            time.sleep(SLOW_S if is_slow else random.uniform(0.0, 0.02))
    digit = 16.0 ** (row % DIGITS)
    metrics = {f"sum{n}": (digit * (row // DIGITS == n)).mean() for n in range(ROWS // DIGITS)}
    return {"loss": model(x).square().mean(), **metrics}


def wait_for_all(number: int) -> None:
    (folder / f"{pattern}-{number}").touch()
    while len(list(folder.glob(f"{pattern}-*"))) < WORKERS:
        time.sleep(0.005)


class FaultPlan(threading.Thread):
    """Kills workers at random moments, while another one computes; then stops the run."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.killed: list[int] = []

    def run(self) -> None:
        chance = random.Random(os.getpid())
        for number in range(kills):
            self._wait_for(1 + number * stop_at // kills)
            while len(able := self._able()) < 2 and trainer.global_step < stop_at:
                time.sleep(0.001)
            if trainer.global_step < stop_at:
                time.sleep(chance.uniform(0.0, 0.03))
                number, pid = chance.choice(able)
                os.kill(pid, signal.SIGKILL)
                self.killed.append(number)
        if stop_at:
            self._wait_for(stop_at)
            os.kill(os.getpid(), signal.SIGTERM)

    def _able(self) -> list[tuple[int, int]]:
        transport: Processes = trainer._loop.transport
        joined = {m.number for m in transport.members if m.state is State.JOINED}
        pids = [(status.number, status.pid) for status in transport.status()]
        return [(number, pid) for number, pid in pids if number in joined and pid is not None]

    def _wait_for(self, step: int) -> None:
        while trainer.global_step < step:
            time.sleep(0.001)


last_at = 0.0


def constant(_step: int) -> float:
    """A schedule: called when an update is made."""
    global last_at
    last_at = time.time()
    return 1.0


torch.manual_seed(0)
trainer: Any = quorate.Trainer(
    nn.Linear(3, 1),
    loss,
    optimizer=quorate.Optimize(
        lambda params: torch.optim.SGD(params, lr=1e-3),
        schedule=lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, constant),
    ),
    batch_size=BATCH,
)
WORKERS = len(trainer._crew.groups)
data = TensorDataset(torch.randn(ROWS, 3), torch.arange(ROWS, dtype=torch.float64))
plan = FaultPlan()
if here() is None:
    plan.start()
try:
    trainer.fit(data, steps=steps)
finally:
    if here() is None:
        times = {"last_at": last_at, "ended_at": time.time()}
        print(json.dumps({**times, "killed": plan.killed}))
