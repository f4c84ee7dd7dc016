"""Update rules beside each other when one of four workers is sometimes slow.

    python benchmarks/straggler.py [--rounds 3] [--seconds 8] [--rows 60000] [--json FILE]

A small perceptron on the images of Fashion-MNIST, 256 rows as 4 shards on 4 worker processes. A
shard takes 20 ms more than its computation, asleep, which stands for a device of its own: four
workers do not fit on two cores. Worker 3 sleeps 5 times as long as a shard takes at a random fifth
of its shards. "sync, no take-over" is sync without copies of what another worker is slow with.

Printed are medians over the rounds: updates and rows per second, and the loss on the 10,000 test
images after the same wall time and after the same number of rows. Learning rates follow the rows of
an update: 0.2 for 256, 0.15 for 192, 0.05 for 64.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))  # for open_data

import torch
import torch.nn.functional as F
from open_data import fashion_mnist
from torch import nn

import quorate
from quorate.coordination import rules
from quorate.engines.processes.worker import here

SHARD_S = 0.02
SLOWER, SHARE = 5, 0.2


class NoTakeOver(rules.Sync):
    """Sync as others have it: everyone waits for the slowest."""

    name = form = "sync-no-take-over"
    copies = False


rules.RULES = (*rules.RULES, NoTakeOver)
CONTENDERS = {
    "sync, no take-over": ("sync-no-take-over", 0.2),
    "sync": ("sync", 0.2),
    "quorum:3": ("quorum:3", 0.15),
    "bounded:4": ("bounded:4", 0.05),
    "async": ("async", 0.05),
}
dice = random.Random(0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(784, 128)
        self.out = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.out(F.relu(self.hidden(images.flatten(1) / 255 - 0.5)))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    if (worker := here()) is not None:
        slow = worker.number == 3 and dice.random() < SHARE
        time.sleep(SHARD_S * (1 + SLOWER * slow))
    return F.cross_entropy(model(images), labels)


def contend(name: str, seconds: float, rows: int) -> dict[str, float]:
    """One run, until both the time and the rows are reached."""
    update, lr = CONTENDERS[name]
    train, test = fashion_mnist.load(None)
    images, labels = test.tensors
    trainer = quorate.Trainer(
        Net,
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=lr),
        batch_size=256,
        shards=4,
        devices="cpu",
        workers=quorate.Workers(4, engine="processes"),
        update=update,
    )
    found: dict[str, float] = {}
    counted = updates = 0
    begun: float | None = None
    paused_s = 0.0
    for report in trainer.updates(train, epochs=1000):
        if report.global_step == 20:  # workers have started and are warm
            begun = time.monotonic()
        if begun is None:
            continue
        counted, updates = counted + report.rows, updates + 1
        elapsed_s = time.monotonic() - begun - paused_s
        reached = {"same time": elapsed_s >= seconds, "same rows": counted >= rows}
        for what in [w for w, there in reached.items() if there and w not in found]:
            found[what] = float(F.cross_entropy(trainer.model(images), labels).detach())
            if what == "same time":
                found["updates/s"], found["rows/s"] = updates / elapsed_s, counted / elapsed_s
        if len(found) == 4:
            break
        paused_s = time.monotonic() - begun - elapsed_s
    return found


def main() -> None:
    """Run the rounds, interleaved, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        print(json.dumps(contend(options.contender, options.seconds, options.rows)))
        return
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    for _ in range(options.rounds):
        for name, found in results.items():
            command = [sys.executable, __file__, "--contender", name]
            command += ["--seconds", str(options.seconds), "--rows", str(options.rows)]
            ended = subprocess.run(command, check=True, capture_output=True, text=True)
            found.append(json.loads(ended.stdout.splitlines()[-1]))
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    columns = ["updates/s", "rows/s", "same time", "same rows"]
    print(f"| rule | updates/s | rows/s | loss after {options.seconds:g} s | ", end="")
    print(f"loss after {options.rows:,} rows |\n|---|---|---|---|---|")
    for name, found in results.items():
        middle = [statistics.median(each[column] for each in found) for column in columns]
        print("| {} | {:.1f} | {:,.0f} | {:.3f} | {:.3f} |".format(name, *middle))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
