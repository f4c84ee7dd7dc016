"""A case: a training as a stranger would write it, and what ought to become of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

STEPS = 12
BATCH = 24
SHARDS = 6

# What may become of a case. Nothing of it is silent.
SAME = "same"  # the same bits everywhere, and no doubt
SAID = "said"  # a doubt is said, with a name in it
REFUSED = "refused"  # one line, exit code 2; or the line of whoever raised, with 1

Loss = Callable[[nn.Module, Any], Any]
SGD = partial(torch.optim.SGD, lr=0.05)


@dataclass
class Case:
    """A training.

    Args:
        outcomes: any of those is right.
        names: what a doubt or a refusal has to name.
        after: what a plain loop does after its update number n, beside callbacks' effects:
            ``after(model, optimizer, n)``. A case that has a plain loop is compared with it.
        plain: whether the right values are those of a plain loop over the same shards.
    """

    model: nn.Module
    loss: Loss
    data: Any
    optimizer: Any = SGD
    callbacks: Sequence[Any] = ()
    after: Callable[[nn.Module, torch.optim.Optimizer, int], None] | None = None
    plain: bool = True
    outcomes: tuple[str, ...] = (SAME,)
    names: str = ""
    settings: dict[str, Any] = field(default_factory=dict)  # further ones of Trainer
    optimize: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()  # of the command


CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    """List a case under its function's name."""
    name = make.__name__
    assert name not in CASES, name
    CASES[name] = make
    return make


# --- data, seeded ---------------------------------------------------------------------------------


def vectors(rows: int = 96, classes: int = 3) -> TensorDataset:
    """Rows of 8 numbers and a class."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 8, generator=g)
    y = (x @ torch.randn(8, classes, generator=g)).argmax(1)
    return TensorDataset(x, y)


def tokens(rows: int = 96, length: int = 10, words: int = 20) -> TensorDataset:
    """Rows of token numbers and a class."""
    g = torch.Generator().manual_seed(2)
    x = torch.randint(1, words, (rows, length), generator=g)
    return TensorDataset(x, x.sum(1) % 3)


def images(rows: int = 96, channels: int = 3) -> TensorDataset:
    """Rows of images of 8 x 8, and a class."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(rows, channels, 8, 8, generator=g)
    return TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    """Classes from the first of the batch."""
    return F.cross_entropy(model(batch[0]), batch[1])


def mlp(hidden: int = 16) -> nn.Sequential:
    """A small network over ``vectors``."""
    return nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 3))
