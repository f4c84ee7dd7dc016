"""Metrics that are no means: a confusion matrix, and a ratio of counts.

    quorate run --devices cpu --workers 2 --run-dir RUN tests/scripts/counted.py MISTAKE

MISTAKE is "none", or what the loss function does wrong in an evaluation.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate

CLASSES, LENGTH, FEATURES = 5, 9, 6


def rows(count: int, seed: int) -> TensorDataset:
    """Sentences of "words": (LENGTH, FEATURES) to a class each."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, LENGTH, FEATURES, generator=draw)
    noise = torch.randn(count, LENGTH, CLASSES, generator=draw)
    return TensorDataset(x, (x[..., :CLASSES] + 0.7 * noise).argmax(-1))


def confusion(true: torch.Tensor, guess: torch.Tensor) -> torch.Tensor:
    cells = (CLASSES * true + guess).flatten()
    return torch.bincount(cells, minlength=CLASSES**2).view(CLASSES, CLASSES)


def iou(total: torch.Tensor) -> dict[str, float]:
    both = total.diagonal().double()
    each = both / (total.sum(0) + total.sum(1) - both)
    return {"mean_iou": float(each.mean())} | {f"iou_{n}": float(v) for n, v in enumerate(each)}


def score(total: torch.Tensor) -> float:
    """Return a number that is no sum of means: of the words that are right and all words."""
    right, words = total.double()
    return float(torch.exp(1 - words / right))


def loss_but(mistake: str) -> Any:
    def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
        x, true = batch
        logits = model(x)
        guess = logits.argmax(-1)
        matrix = confusion(true, guess)
        found = {
            "loss": F.cross_entropy(logits.flatten(0, 1), true.flatten()),
            "confusion": matrix,
            "weight": true.numel(),
        }
        if model.training:
            return found
        found["score"] = torch.stack([(true == guess).sum(), torch.tensor(true.numel())])
        match mistake:
            case "float":
                found["confusion"] = matrix / 2
            case "shape":
                found["confusion"] = torch.bincount(guess.flatten()[: int(x[0, 0, 0] > 0) * 4])
            case "absent" if x[0, 0, 0] > 0:
                del found["confusion"]
            case "unlisted":
                found["confusions"] = matrix
        return found

    return loss


def broken(total: torch.Tensor) -> float:
    raise ArithmeticError(f"no number from {total.sum()} counts")


def trainer_of(mistake: str = "none", **options: Any) -> quorate.Trainer:
    finish: Any = {
        "raises": broken,
        "text": lambda _: {"mean_iou": "high"},
        "taken": lambda _: {"mean_iou": 1.0, "score": 1.0},
        "loss": lambda _: {"loss": 1.0},
    }.get(mistake, iou)
    torch.manual_seed(0)
    return quorate.Trainer(
        nn.Linear(FEATURES, CLASSES),
        loss_but(mistake),
        totals={"confusion": finish, "score": score},
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        batch_size=23,
        shards=5,
        **options,
    )


if __name__ == "__main__":
    training, test = rows(67, 1), rows(41, 2)  # a last batch of 21, and of 18 rows
    trainer = trainer_of(sys.argv[1])
    trainer.fit(
        training,
        epochs=2,
        validation=quorate.Validation(test, best="max:mean_iou"),
    )
