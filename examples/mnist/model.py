"""The network of the multi-tower tutorial for MNIST, its loss, and its accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Net(nn.Module):
    """28x28 grey images to ten logits; 3.3 million parameters.

    Weights are drawn from a normal distribution that is cut off at two standard deviations, and
    biases are constant, with the tutorial's numbers.

    Args:
        filters: of the two convolutions.
        units: of the dense layer behind them.
    """

    def __init__(self, filters: Sequence[int] = (32, 64), units: int = 1024) -> None:
        super().__init__()
        first, second = filters
        self.conv1 = nn.Conv2d(1, first, 5, padding=2)
        self.conv2 = nn.Conv2d(first, second, 5, padding=2)
        self.local3 = nn.Linear(second * 7 * 7, units)
        self.local4 = nn.Linear(units, 10)
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


def loss_with(
    l2: float = 0.0,
) -> Callable[[nn.Module, Iterable[torch.Tensor]], dict[str, torch.Tensor]]:
    """Cross entropy and accuracy, means over the rows of a batch.

    With ``l2`` the loss has l2 / 2 times the squares of all weights, of no bias, besides. That is
    the same for every shard of a batch, and so for the mean of all shards: it counts once.
    """

    def loss(model: nn.Module, batch: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        images, labels = batch
        logits = model(images)
        mean = F.cross_entropy(logits, labels)
        if l2:
            weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
            mean = mean + l2 / 2 * torch.stack([p.square().sum() for p in weights]).sum()
        return {"loss": mean, "accuracy": (logits.argmax(1) == labels).float().mean()}

    return loss


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
