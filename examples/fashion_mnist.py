"""The main job: a convolutional network on Fashion-MNIST, on as many devices as there are.

    python examples/fashion_mnist.py                                           # every device
    quorate run --devices cpu --workers 1 examples/fashion_mnist.py            # one CPU worker
    quorate run --devices cuda:0,cuda:1 examples/fashion_mnist.py --epochs 10  # two GPUs

The network is that of TensorFlow's multi-tower MNIST tutorials: two 5x5 convolutions of 32 and 64
filters, a dense layer of 1024, two small dense layers. It ends with exit code 1 if the accuracy on
the test images is below --target.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from open_data import fashion_mnist
from torch import nn

import quorate


class Net(nn.Module):
    """28x28 grey images to ten logits; 3.3 million parameters."""

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
            (self.softmax_linear, 0.3, 0.0),
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


def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cross entropy and accuracy, means over the rows of the batch."""
    images, labels = batch
    logits = model(images)
    return {
        "loss": F.cross_entropy(logits, labels),
        "accuracy": (logits.argmax(1) == labels).float().mean(),
    }


def main() -> None:
    """Train, evaluate, and say where the results are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=256, help="rows per update")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.05, help="falls to 0 along a cosine")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--warm-up", type=int, default=0, help="updates in which the rate rises")
    parser.add_argument("--data", type=Path, help="a folder with the four IDX files")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/fashion_mnist"))
    parser.add_argument("--target", type=float, default=0.90, help="least test accuracy")
    options = parser.parse_args()

    train, test = fashion_mnist.load(options.data)

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        updates = options.epochs * trainer.updates_per_epoch(train)
        if not options.warm_up:
            return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda n: min(1, (n + 1) / options.warm_up) * (1 + math.cos(math.pi * n / updates)) / 2,
        )

    trainer = quorate.Trainer(
        Net,
        loss,
        optimizer=quorate.Optimize(
            lambda params: torch.optim.SGD(
                params,
                lr=options.lr,
                momentum=options.momentum,
                nesterov=options.momentum > 0,
                weight_decay=1e-4,
            ),
            schedule=schedule,
        ),
        batch_size=options.batch_size,
        shards=options.shards,
        run_dir=quorate.RunDir(options.run_dir, save_every_s=20.0),
    )
    trainer.fit(train, epochs=options.epochs, validation=test)
    accuracy = trainer.evaluate(test)["accuracy"]
    print(f"test accuracy {accuracy:.4f}, target {options.target}")
    print(f"results: {trainer.run_dir}  (quorate inspect {trainer.run_dir})")
    if accuracy < options.target:
        sys.exit(1)


if __name__ == "__main__":
    main()
