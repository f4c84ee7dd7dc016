"""The seed network for benchmarks: its data, its loop by hand, and quorate on an engine.

The network of ``examples/fashion_mnist.py``, 64 rows per worker, Nesterov SGD. ``peers.py`` has it
beside other trainers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from fashion_mnist import Net, loss

import quorate

ROWS, PER_WORKER, WARM_UP = 12_800, 64, 15


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Random images and labels of Fashion-MNIST's shapes and dtypes."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (ROWS, 1, 28, 28), dtype=torch.uint8, generator=generator)
    return images, torch.randint(0, 10, (ROWS,), generator=generator)


def sgd(params: object, **options: bool) -> torch.optim.Optimizer:
    """The optimizer of all contenders."""
    return torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True, **options)  # type: ignore[arg-type]


def timed(
    step: Callable[[], None],
    rows: int,
    steps: int,
    ready: Callable[[], object] = int,
    done: Callable[[], object] = int,
) -> float:
    """Examples per second of ``steps`` steps, after a warm-up and when ``ready`` returns.

    ``done`` waits for what the steps have left to a device.
    """
    for _ in range(WARM_UP):
        step()
    ready()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    done()
    return rows * steps / (time.perf_counter() - begun)


def by_hand(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0, ranks: int = 1
) -> Callable[[], None]:
    """The loop that people write: one step of it."""
    images, labels = data()

    def batches() -> Iterator[torch.Tensor]:
        while True:
            order = torch.randperm(ROWS)[rank::ranks]
            yield from order.split(PER_WORKER)[: len(order) // PER_WORKER]

    each = batches()

    def step() -> None:
        rows = next(each)
        logits = model(images[rows])
        optimizer.zero_grad()
        value = F.cross_entropy(logits, labels[rows])
        value.backward()
        optimizer.step()
        value.item()

    return step


def quorate_on(
    engine: str,
    workers: int,
    steps: int,
    precision: str = "fp32",
    exchange: str = "ordered",
) -> float:
    """Quorate, 64 rows per shard, one shard per worker."""
    trainer = quorate.Trainer(
        Net,
        loss,
        optimizer=sgd,
        batch_size=PER_WORKER * workers,
        shards=workers,
        devices="cpu",
        workers=quorate.Workers(workers, engine=engine, exchange=exchange),
        precision=precision,
    )
    updates = trainer.updates(TensorDataset(*data()), steps=WARM_UP + steps)
    try:
        return timed(lambda: void(next(updates).loss), PER_WORKER * workers, steps)
    finally:
        updates.close()


def void(_: object) -> None:
    """Nothing."""
