"""What is trained: the seed network and that of examples/chatbot, with data and a loss function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "chatbot"))
from data import Batch
from loss import Loss
from model import Seq2Seq
from seed_network import Net, data, loss, sgd


class Work(NamedTuple):
    """A network, its data and how it is trained."""

    network: Callable[[], nn.Module]
    loss: Callable[[Any, Any], dict[str, Any]]
    optimizer: Callable[..., torch.optim.Optimizer]
    tensors: Callable[[], tuple[torch.Tensor, ...]]
    rows: int  # per update


def pairs() -> tuple[torch.Tensor, ...]:
    """Questions (6400, 12) and answers (6400, 17) of random words, none of them special."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((6400, 12), (6400, 17))
    return tuple(torch.randint(5, 4000, shape, generator=generator) for shape in shapes)


def pairs_loss(model: Any, batch: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The chatbot's own loss; it needs a vocabulary only to evaluate."""
    questions, answers = batch
    return Loss(None, "zh")(model, Batch(questions, questions, answers))  # type: ignore[arg-type]


def adam(params: Any, **options: bool) -> torch.optim.Optimizer:
    """The chatbot's optimizer."""
    return torch.optim.Adam(params, lr=1e-3, **options)


WORKS = {
    "seed": Work(Net, loss, sgd, data, 256),
    "chatbot": Work(lambda: Seq2Seq(4000), pairs_loss, adam, pairs, 64),
}
