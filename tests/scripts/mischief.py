"""A small training whose shards do mischief in worker processes; the first argument says which.

    quorate run --devices cpu --workers 2 tests/scripts/mischief.py once FOLDER

Whatever happens once leaves a file in FOLDER.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.transports.processes.worker import here

mischief, folder = sys.argv[1], Path(sys.argv[2])
ROWS, BATCH, SHARDS = 128, 16, 4


class MineError(Exception):
    """Of a type that the coordinator's process does not take from the worker's."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def once(name: str) -> bool:
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def fail() -> None:
    raise MineError(3, 4)


def wait_for_all() -> None:
    """An exception is tried on another worker only if there is one."""
    while len(list(folder.glob("arrived-*"))) < 2:
        time.sleep(0.01)
    time.sleep(0.5)


def disturb(step: int, shard: int, number: int) -> None:
    match mischief, step, shard:
        case ["once", 0, _]:
            wait_for_all()
        case ["raise", 3, 2]:
            print("a worker's own words")
            fail()
        case ["segfault", 3, 1]:
            ctypes.string_at(0)
        case ["memory", 3, 1]:
            torch.empty(1 << 50)
        case ["once", 1, 2] if once("raised"):
            fail()
        case (("once" | "hang"), 2, _) if once(f"hung-{number}"):
            while True:
                time.sleep(0.01)
        case ["once", 3, 1] if once("ended"):
            os._exit(3)
        case ["once", 4, 0] if once("crashed"):
            ctypes.string_at(0)


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    rows, x = batch
    out: torch.Tensor = model(x)
    if (worker := here()) is not None:
        step, row = divmod(int(rows[0]), BATCH)
        disturb(step, row // (BATCH // SHARDS), worker.number)
        if (mischief, step) == ("vector", 3):
            return out.square()
    return out.square().mean()


if (worker := here()) is not None:
    once(f"arrived-{worker.number}")
generator = torch.Generator().manual_seed(0)
trainer = quorate.Trainer(
    lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1)),
    loss,
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
    batch_size=BATCH,
    shards=SHARDS,
    workers=quorate.Workers(timeout_s=8.0 if mischief in ("once", "hang") else 300.0),
)
trainer.fit(
    TensorDataset(torch.arange(ROWS), torch.randn(ROWS, 6, generator=generator)), shuffle=False
)
