"""What single.py and train.py have in common: options, network, optimizer, schedule."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from data import distorted
from model import L2, LeNet5
from torch import nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset


def parse(description: str, *, threads: bool = False) -> argparse.Namespace:
    """The command line; for a plain loop with ``--threads``, which are set."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    add = parser.add_argument_group("recipe").add_argument
    add("--epochs", type=int, default=Recipe.epochs, help="passes over the images")
    add("--steps", type=int, help="updates, in place of epochs")
    add("--batch-size", type=int, default=Recipe.batch_size, help="images of an update")
    add("--lr", type=float, default=Recipe.lr, help="of Adam, at first")
    add("--lr-decay", type=float, default=Recipe.lr_decay, help="of it in --decay-steps updates")
    add("--decay-steps", type=int, default=Recipe.decay_steps)
    add("--l2", type=float, default=Recipe.l2, help="penalty on the squares of all weights")
    add("--ema-decay", type=float, default=Recipe.ema_decay, help="of the averaged weights")
    add("--filters", type=int, nargs=2, default=Recipe.filters, help="of the two convolutions")
    add("--units", type=int, default=Recipe.units, help="of the dense layer")
    add("--seed", type=int, default=Recipe.seed, help="of weights, order and distortion")
    add = parser.add_argument_group("run").add_argument
    add("--data", type=Path, help="a folder with CIFAR-10's binary version")
    add("--target", type=float, default=0.72, help="least test accuracy")
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

    epochs: int = 6
    steps: int | None = None
    batch_size: int = 128
    lr: float = 1e-3
    lr_decay: float = 0.99
    decay_steps: int = 64
    l2: float = L2
    ema_decay: float = 0.99
    filters: Sequence[int] = (32, 64)
    units: int = 512
    seed: int = 0

    @classmethod
    def of(cls, options: argparse.Namespace) -> Recipe:
        """What the command line says."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})

    def updates(self, rows: int) -> int:
        """How many there are, in a training on so many images."""
        return self.steps or self.epochs * math.ceil(rows / self.batch_size)

    def network(self) -> LeNet5:
        """A new one."""
        return LeNet5(self.filters, self.units)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Adam."""
        return Adam(parameters, lr=self.lr)

    def schedule(self, optimizer: Optimizer) -> LambdaLR:
        """In 64 updates the rate falls to 0.99 of what it was, a little in each."""
        return LambdaLR(optimizer, lambda n: self.lr_decay ** (n / self.decay_steps))

    def averaged(self, model: nn.Module) -> AveragedModel:
        """The moving average of a model's weights, for a plain loop."""
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(self.ema_decay))

    def batches(self, train: TensorDataset) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Those of all updates, distorted, each epoch in an order of its own."""
        left = self.updates(len(train))
        for epoch in range(left):  # at least one update each
            for batch in distorted(train, self.batch_size, epoch, self.seed):
                if left == 0:
                    return
                yield batch
                left -= 1
