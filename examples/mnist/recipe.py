"""What single.py and train.py have in common: options, network, optimizer, schedule."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from model import Net
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def parse(description: str, *, threads: bool = False) -> argparse.Namespace:
    """The command line; for a plain loop with ``--threads``, which are set."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    add = parser.add_argument_group("recipe").add_argument
    add("--num-epochs", type=int, default=Recipe.num_epochs, help="passes over the images")
    add("--steps", type=int, help="updates, in place of epochs")
    add("--batch-size", type=int, default=Recipe.batch_size, help="images of an update")
    add("--lr", type=float, default=Recipe.lr, help="at first")
    add("--lr-decay", type=float, help="what of the rate is left after --decay-steps updates")
    add("--decay-steps", type=int, default=Recipe.decay_steps, help="default decay: a cosine to 0")
    add("--momentum", type=float, default=Recipe.momentum, help="Nesterov's; 0: none")
    add("--l2", type=float, default=Recipe.l2, help="penalty on the squares of all weights")
    add("--ema-decay", type=float, help="of averaged weights, which are then the ones tested")
    add("--filters", type=int, nargs=2, default=Recipe.filters, help="of the two convolutions")
    add("--units", type=int, default=Recipe.units, help="of the dense layer")
    add("--seed", type=int, default=Recipe.seed, help="of weights and order")
    add = parser.add_argument_group("run").add_argument
    add("--data", type=Path, help="a folder with the two TFRecord files")
    add("--target", type=float, default=0.99, help="least test accuracy")
    add("--log-every", type=int, default=100, help="updates per line of the log")
    if threads:
        add("--threads", type=int, help="that compute; default: as torch does")
    options = parser.parse_args()
    if threads and options.threads is not None:
        torch.set_num_threads(options.threads)
    return options


@dataclass(frozen=True)
class Recipe:
    """How the network is made and trained."""

    num_epochs: int = 4
    steps: int | None = None
    batch_size: int = 128
    lr: float = 0.05
    lr_decay: float | None = None
    decay_steps: int = 64
    momentum: float = 0.9
    l2: float = 0.0
    ema_decay: float | None = None
    filters: Sequence[int] = (32, 64)
    units: int = 1024
    seed: int = 0

    @classmethod
    def of(cls, options: argparse.Namespace) -> Recipe:
        """What the command line says."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})

    def updates(self, rows: int) -> int:
        """How many there are, in a training on so many images."""
        return self.steps or self.num_epochs * math.ceil(rows / self.batch_size)

    def done(self, rows: int) -> str:
        """The tutorial's last line; an epoch that was not finished is not counted."""
        updates = self.updates(rows)
        epochs = updates // math.ceil(rows / self.batch_size)
        return f"Done training for {epochs} epochs, {updates} steps."

    def network(self) -> Net:
        """A new one."""
        return Net(self.filters, self.units)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Stochastic gradient descent with Nesterov's momentum."""
        nesterov = self.momentum > 0
        return SGD(parameters, lr=self.lr, momentum=self.momentum, nesterov=nesterov)

    def schedule(self, rows: int) -> Callable[[Optimizer], LRScheduler]:
        """Have the rate fall to 0 along a cosine, or by a factor in so many updates."""
        decay, updates = self.lr_decay, self.updates(rows)
        if decay is None:
            return lambda optimizer: CosineAnnealingLR(optimizer, updates)
        return lambda optimizer: LambdaLR(optimizer, lambda n: decay ** (n / self.decay_steps))

    def averaged(self, model: nn.Module) -> AveragedModel | None:
        """A moving average of the weights, for a plain loop; None without a decay."""
        if self.ema_decay is None:
            return None
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(self.ema_decay))


def endless(batches: Iterable[Any]) -> Iterator[Any]:
    """Batches, pass after pass, each in an order of its own."""
    while True:
        yield from batches
