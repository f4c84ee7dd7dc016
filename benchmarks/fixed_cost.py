"""What an update costs beside its arithmetic: a model so small that little else is left.

    python benchmarks/fixed_cost.py [--rounds 7]

A perceptron of 64, 256 and 10, 64 rows, SGD with momentum, one thread: microseconds per update of a
hand-written loop and of quorate on one tower, interleaved in one process, medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate

ROWS, BATCH = 12_800, 64
UPDATES = ROWS // BATCH


def net() -> nn.Module:
    """The perceptron."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def sgd(params: object) -> torch.optim.Optimizer:
    """The optimizer of both."""
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)  # type: ignore[arg-type]


def main() -> None:
    """Run the rounds and print both medians and their difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    x, y = torch.randn(ROWS, 64), torch.randint(0, 10, (ROWS,))
    model = net()
    optimizer = sgd(model.parameters())

    def by_hand() -> None:
        for rows in torch.randperm(ROWS).split(BATCH):
            value = F.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            value.item()

    trainer = quorate.Trainer(
        net,
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=sgd,
        batch_size=BATCH,
        shards=1,
        devices="cpu",
        workers=1,
    )
    updates = trainer.updates(TensorDataset(x, y), epochs=rounds + 1)
    hand_us, quorate_us = [], []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        by_hand()
        hand_us.append((time.perf_counter() - begun) / UPDATES * 1e6)
        begun = time.perf_counter()
        for _ in range(UPDATES):
            next(updates)
        quorate_us.append((time.perf_counter() - begun) / UPDATES * 1e6)
    updates.close()
    # The first round warms up.
    hand, ours = statistics.median(hand_us[1:]), statistics.median(quorate_us[1:])
    print(f"by hand {hand:.0f} us, quorate {ours:.0f} us an update: {ours - hand:.0f} us more")


if __name__ == "__main__":
    main()
