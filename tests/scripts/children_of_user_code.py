"""A run whose callback and whose dataset fork, and end their forks by SIGTERM.

Who forked, the signal handlers in a fork, and how forks ended are lines of JSON in the file FOUND.
``fit`` comes back although a fork of the callback is alive.
"""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import quorate

FORK = multiprocessing.get_context("fork")


def handlers(_: object) -> list[str]:
    """Return this process's handlers for the signals of a job, and its wakeup descriptor."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    names = [getattr(h := signal.getsignal(n), "name", None) or h.__name__ for n in numbers]
    return [*names, str(signal.set_wakeup_fd(-1))]


def sleeping() -> Any:
    process = FORK.Process(target=time.sleep, args=(600,), daemon=True)
    process.start()
    return process


def fork_and_end(who: str) -> None:
    with FORK.Pool(2) as pool:
        found = pool.map(handlers, range(1))[0]
    process = sleeping()
    process.terminate()  # perhaps before the process is back from the fork
    process.join(20)
    process.kill()
    with Path(os.environ["FOUND"]).open("a") as file:
        file.write(json.dumps([who, found, process.exitcode]) + "\n")


class Forks(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0:
            fork_and_end("dataset")
        return torch.full((2,), float(index))


class AlsoForks(quorate.Callback):
    def updated(self, report: Any) -> None:
        fork_and_end("callback")
        self.stays = sleeping()


if __name__ == "__main__":
    trainer = quorate.Trainer(
        nn.Linear(2, 1),
        lambda model, batch: model(batch).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch_size=8,
        shards=2,
    )
    callback = AlsoForks()
    trainer.fit(Forks(), steps=1, callbacks=[callback])
    callback.stays.terminate()
    callback.stays.join()
    print("left: nobody", flush=True)
