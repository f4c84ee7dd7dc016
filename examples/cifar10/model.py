"""LeNet-5 for CIFAR-10, with two 5x5 convolutions of 32 and 64 filters, and how it is trained."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

L2 = 1e-4


class LeNet5(nn.Module):
    """28x28 colour images to ten logits; 1.7 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.dense1 = nn.Linear(64 * 7 * 7, 512)
        self.dense2 = nn.Linear(512, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits, (B, 10), of standardised images (B, 3, 28, 28)."""
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.dense2(F.relu(self.dense1(x.flatten(1))))


def loss(model: nn.Module, batch: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cross entropy, a mean over the rows, and L2 / 2 times the squares of the weights, of no bias.

    The second part is the same for every shard of a batch, and so it is the mean of all shards too:
    however many there are, it counts once.
    """
    images, labels = batch
    logits = model(images)
    cross_entropy = F.cross_entropy(logits, labels)
    squares = [p.square().sum() for name, p in model.named_parameters() if name.endswith("weight")]
    return {
        "loss": cross_entropy + L2 / 2 * torch.stack(squares).sum(),
        "cross_entropy": cross_entropy,
        "accuracy": (logits.argmax(1) == labels).float().mean(),
    }


def adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Adam, at first with a rate of 0.001."""
    return Adam(parameters, lr=1e-3)


def decay(optimizer: Optimizer) -> LambdaLR:
    """In 64 updates the rate falls to 0.99 of what it was, a little in each."""
    return LambdaLR(optimizer, lambda updates: 0.99 ** (updates / 64))


BATCH_SIZE, EMA_DECAY = 128, 0.99


@torch.no_grad()
def accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    """The share of the images that a model is right about."""
    device = next(model.parameters()).device
    right = 0
    for images, labels in zip(*(tensor.split(500) for tensor in dataset.tensors), strict=True):
        right += int((model(images.to(device)).argmax(1).cpu() == labels).sum())
    return right / len(dataset)
