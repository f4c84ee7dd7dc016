"""The network of the multi-tower tutorial for MNIST, its loss, and how it is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.utils.data import DataLoader, Dataset

INITIAL_LEARNING_RATE = 0.05


class Net(nn.Module):
    """28x28 grey images to ten logits; 3.3 million parameters.

    Weights are drawn from a normal distribution that is cut off at two standard deviations, and
    biases are constant, with the tutorial's numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.local3 = nn.Linear(64 * 7 * 7, 1024)
        self.local4 = nn.Linear(1024, 10)
        self.softmax_linear = nn.Linear(10, 10)
        for layer, deviation, bias in (
            (self.conv1, 5e-2, 0.0),
            (self.conv2, 5e-2, 0.1),
            (self.local3, 0.04, 0.1),
            (self.local4, 0.04, 0.1),
            (self.softmax_linear, 1 / 192, 0.0),
        ):
            nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
            nn.init.constant_(layer.bias, bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits, (B, 10), of images (B, 1, 28, 28) in bytes."""
        x = images / 255 - 0.5
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.local3(x.flatten(1)))
        return self.softmax_linear(F.relu(self.local4(x)))


def loss(model: nn.Module, batch: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cross entropy and accuracy, means over the rows of the batch."""
    images, labels = batch
    logits = model(images)
    return {
        "loss": F.cross_entropy(logits, labels),
        "accuracy": (logits.argmax(1) == labels).float().mean(),
    }


def nesterov(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Stochastic gradient descent with Nesterov's momentum."""
    return torch.optim.SGD(parameters, lr=INITIAL_LEARNING_RATE, momentum=0.9, nesterov=True)


def falling(updates: int) -> Callable[[Optimizer], LRScheduler]:
    """Have the rate fall to 0 along a cosine, in so many updates."""
    return lambda optimizer: CosineAnnealingLR(optimizer, updates)


# By the names of Trainer's arguments.
BATCH_SIZE = 128


@torch.no_grad()
def accuracy(model: nn.Module, dataset: Dataset[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The share of the images that a model is right about."""
    device = next(model.parameters()).device
    model.eval()
    right = rows = 0
    for images, labels in DataLoader(dataset, batch_size=500):
        right += int((model(images.to(device)).argmax(1).cpu() == labels).sum())
        rows += len(labels)
    model.train()
    return right / rows
