"""A run whose callback and whose dataset start processes of their own, and end them by SIGTERM.

    quorate run --engine ENGINE --workers N tests/scripts/children_of_user_code.py [UPDATES]

Prints a JSON object: how the children ended and which handlers a fork found, by who started it.
``fit`` comes back although a fork of a callback is alive.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import quorate

FORK = multiprocessing.get_context("fork")
LONG = [sys.executable, "-S", "-c", "import time; print(flush=True); time.sleep(600)"]


def handlers(_: object = None) -> list[str]:
    """What this process does about the signals of a job, and whether it tells another of them."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    names = [getattr(h := signal.getsignal(n), "name", None) or h.__name__ for n in numbers]
    return [*names, str(signal.set_wakeup_fd(-1))]


def sleep() -> None:
    time.sleep(600)


def ended() -> dict[str, Any]:
    """How children end that are asked to at once, or a moment later."""
    found: dict[str, Any] = {}
    with FORK.Pool(2) as pool:
        found["handlers"] = pool.map(handlers, range(1))[0]
    process = FORK.Process(target=sleep, daemon=True)
    process.start()
    process.terminate()  # before it is back from the fork, perhaps
    process.join(20)
    found["fork"] = process.exitcode
    program = subprocess.Popen(LONG, stdout=subprocess.PIPE)
    assert program.stdout is not None
    program.stdout.readline()
    program.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(20)
    found["program"] = program.poll()
    for each in (process, program):
        each.kill()
    return found


class Starting(Dataset[torch.Tensor]):
    """Starts children whenever the first row is loaded."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0:
            with Path(os.environ["FOUND"]).open("a") as file:
                file.write(json.dumps(["dataset", ended()]) + "\n")
        return torch.full((2,), float(index))


class Pooling(quorate.Callback):
    """Starts children after each update, and one that outlives the training loop."""

    def __init__(self) -> None:
        self.stays: Any = None

    def updated(self, report: Any) -> None:
        if self.stays is None:
            self.stays = FORK.Process(target=sleep, daemon=True)
            self.stays.start()
        with Path(os.environ["FOUND"]).open("a") as file:
            file.write(json.dumps(["callback", ended()]) + "\n")


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def main() -> None:
    trainer = quorate.Trainer(
        nn.Linear(2, 1),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch_size=4,
        shards=2,
    )
    callback = Pooling()
    trainer.fit(Starting(), steps=int(sys.argv[1]), callbacks=[callback])
    callback.stays.terminate()
    callback.stays.join()
    print("left: nobody", flush=True)


if __name__ == "__main__":
    main()
