"""LeNet-5 for CIFAR-10, two 5x5 convolutions of 32 and 64 filters; its loss and its accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

L2 = 1e-4


class LeNet5(nn.Module):
    """28x28 colour images to ten logits; 1.7 million parameters.

    Args:
        filters: of the two convolutions.
        units: of the dense layer behind them.
    """

    def __init__(self, filters: Sequence[int] = (32, 64), units: int = 512) -> None:
        super().__init__()
        first, second = filters
        self.conv1 = nn.Conv2d(3, first, 5, padding=2)
        self.conv2 = nn.Conv2d(first, second, 5, padding=2)
        self.dense1 = nn.Linear(second * 7 * 7, units)
        self.dense2 = nn.Linear(units, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits, (B, 10), of standardised images (B, 3, 28, 28)."""
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.dense2(F.relu(self.dense1(x.flatten(1))))


def loss_with(
    l2: float,
) -> Callable[[nn.Module, Iterable[torch.Tensor]], dict[str, torch.Tensor]]:
    """Cross entropy, a mean over the rows, and l2 / 2 times the squares of weights, of no bias.

    The second part is the same for every shard of a batch, and so it is the mean of all shards too:
    however many there are, it counts once.
    """

    def loss(model: nn.Module, batch: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        images, labels = batch
        logits = model(images)
        cross_entropy = F.cross_entropy(logits, labels)
        weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
        return {
            "loss": cross_entropy + l2 / 2 * torch.stack([p.square().sum() for p in weights]).sum(),
            "cross_entropy": cross_entropy,
            "accuracy": (logits.argmax(1) == labels).float().mean(),
        }

    return loss


loss = loss_with(L2)


@torch.no_grad()
def accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    """The share of the images that a model is right about."""
    device = next(model.parameters()).device
    right = 0
    for images, labels in zip(*(tensor.split(500) for tensor in dataset.tensors), strict=True):
        right += int((model(images.to(device)).argmax(1).cpu() == labels).sum())
    return right / len(dataset)
