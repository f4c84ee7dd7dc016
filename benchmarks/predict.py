"""What a second worker brings a prediction, on the seed network.

    python benchmarks/predict.py [--rounds 9] [--json FILE]

12,800 rows in pieces of 64, logits into memory, one thread per worker. Rows per second, medians of
rounds, by a plain loop over the same pieces, by one worker, by two towers and by two worker
processes. Each lives in a process of its own and they take their rounds in turn; nobody computes
while another does. The bound is what the project promises: two workers at least 1.8 times one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from seed_network import ROWS, data, sgd
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from fashion_mnist import Net, loss

import quorate

PIECE, WARM_UP = 64, 3
CONTENDERS = {
    "plain loop": None,
    "one worker": ("towers", 1),
    "two towers": ("towers", 2),
    "two processes": ("processes", 2),
}
BOUND = 1.8
CONTENDER = "PREDICT_CONTENDER"  # of a child; its worker processes are to build the same


def logits(model: nn.Module, batch: Any) -> torch.Tensor:
    """What is predicted."""
    return model(batch[0])


def serve(predict: Callable[[], Any]) -> None:
    """Predict whenever a line comes, and say how long it took, in seconds."""
    for _ in sys.stdin:
        begun = time.perf_counter()
        found = predict()
        took = time.perf_counter() - begun
        assert found.shape == (ROWS, 10)
        print(json.dumps(took), file=sys.__stdout__, flush=True)


class Rounds(quorate.Callback):
    """Rounds in the middle of a training: its workers are those that predict."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset

    def started(self, trainer: Any) -> None:
        """Take note of the trainer."""
        self._trainer = trainer

    def updated(self, report: quorate.Report) -> None:  # noqa: ARG002
        """Serve, when all workers are there."""
        serve(lambda: self._trainer.predict(self._dataset, logits))
        self._trainer.stop()


def contend(name: str) -> None:
    """Be a contender: answer each line of standard input."""
    dataset = TensorDataset(*data())
    torch.set_num_threads(1)
    contender = CONTENDERS[name]
    if contender is None:
        model = Net().eval()

        def plain() -> torch.Tensor:
            with torch.no_grad():
                pieces = zip(*(t.split(PIECE) for t in dataset.tensors), strict=True)
                return torch.cat([logits(model, piece) for piece in pieces])

        serve(plain)
        return
    engine, workers = contender
    trainer = quorate.Trainer(
        Net,
        loss,
        optimizer=sgd,
        batch_size=2 * PIECE,
        shards=2,
        devices="cpu",
        workers=quorate.Workers(workers, engine=engine),
    )
    trainer.fit(dataset, steps=40, callbacks=[Rounds(dataset)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    children = {
        name: subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, CONTENDER: name},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for name in CONTENDERS
    }
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for number in range(-WARM_UP, options.rounds):
        for name, child in children.items():
            took = asked(child)
            if number >= 0:
                seconds[name].append(took)
    for child in children.values():
        child.communicate()
    speed = {name: ROWS / statistics.median(each) for name, each in seconds.items()}
    one = speed["one worker"]
    for name, rows_per_s in speed.items():
        print(f"{name:14} {rows_per_s:9,.0f} rows/s  {rows_per_s / one:5.2f} times one worker")
    best = max(speed["two towers"], speed["two processes"]) / one
    print(f"bound: {BOUND}; {'met' if best >= BOUND else 'NOT met'}: {best:.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps({"seconds": seconds, "rows_per_s": speed}, indent=1))


def asked(child: subprocess.Popen[str]) -> float:
    """Have a contender predict once, and return how long it took."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("\n")
    child.stdin.flush()
    for line in child.stdout:
        if line[0].isdigit() and "/" not in line and " " not in line.strip():
            return float(line)
    raise SystemExit("a contender ended")


if __name__ == "__main__":
    if CONTENDER in os.environ:
        contend(os.environ[CONTENDER])
    else:
        main()
