"""A training of any wanted length, for tests that watch, block or spoil the run meanwhile.

    quorate run --engine ray --workers 1:3 tests/scripts/lasting.py pause=0.01 stop=FILE
    quorate run --engine towers tests/scripts/lasting.py updates=120

Words: ``updates``: the number of updates; ``pause``: the least seconds of each shard; ``stop``:
a file whose appearance ends the run; ``begun``: a folder in which each updating process leaves a
file with the pid; ``stuck``: the update after which the run hangs, where no signal ends the run and
no handler is called. With ``stop`` the script prints "N take part" whenever N changes. An update
more or less changes no bit of earlier updates: a tower with as many has the same digest.

``loops``: the number of loops, some left before workers are there; descriptors and children are
printed. ``speaks=stdout,stderr``: all processes print a lot there, and from the step ``full`` on
nothing more can be written there.
"""

import ctypes
import gc
import json
import os
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate

WORDS = dict(word.split("=", 1) for word in sys.argv[1:])
UPDATES = int(WORDS.get("updates", "1000000"))
NAMES = [name for name in WORDS.get("speaks", "").split(",") if name]


@cache  # once in a process
def spoil() -> None:
    for name in NAMES:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, getattr(sys, name).fileno())
        os.close(full)


def speak(step: int) -> None:
    if step >= int(WORDS.get("full", "1000000")):
        spoil()
    for name in NAMES:
        # Some text stays in the buffer, and some overflows the buffer.
        print("a loss", step, "." * 300, file=getattr(sys, name), flush=step % 3 == 0)


def loss(model: nn.Module, batch: list[torch.Tensor], at: Any) -> torch.Tensor:
    speak(at.step)
    time.sleep(float(WORDS.get("pause", "0")))
    return model(batch[0]).square().mean()


class Looks(quorate.Callback):
    present = 0

    def updated(self, report: quorate.Report) -> None:
        speak(report.global_step)
        if "begun" in WORDS:
            Path(WORDS["begun"], str(os.getpid())).touch()
        if report.global_step == int(WORDS.get("stuck", "0")):
            print("stuck", flush=True)
            libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
            for _ in range(2):
                libc.pthread_mutex_lock(mutex)
        if "stop" in WORDS:
            there = [w for w in trainer.workers if not w.is_gone and w.phase != "starting"]
            if self.present != len(there):
                self.present = len(there)
                print(f"{self.present} take part", flush=True)
            if Path(WORDS["stop"]).exists():
                trainer.stop()


def leave_loops(count: int) -> None:
    found = []
    for loop in range(count):
        if loop % 2:  # stopped while workers start
            threading.Timer(0.2 * loop, trainer.stop).start()
        for _ in trainer.updates(data, steps=UPDATES):
            if loop % 2 == 0:
                break
        gc.collect()  # a loop leaves objects that refer to each other, some of them with files
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        files = [*Path("/proc/self/fd").iterdir()]
        found.append({"files": len(files), "children": len(children)})
    print(json.dumps(found))


if __name__ == "__main__":
    torch.manual_seed(0)
    trainer = quorate.Trainer(
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)),
        loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
        batch_size=16,
        shards=4,
    )
    data = TensorDataset(torch.randn(64, 6, generator=torch.Generator().manual_seed(0)))
    if "loops" in WORDS:
        leave_loops(int(WORDS["loops"]))
    else:
        trainer.fit(data, steps=UPDATES, callbacks=[Looks()])
    print(f"came to step {trainer.global_step}")
