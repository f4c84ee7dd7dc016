"""A perceptron that is mostly optimizer: in one piece, or cut in two. See README.md.

python train.py --devices cpu
python train.py --devices cpu+cpu --split decoder
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from limited import join_groups
from torch import nn
from torch.utils.data import TensorDataset

import quorate

WIDTH, LAYERS = 1280, 8  # of each half
ROWS, SHARDS = 8, 4  # of a shard, of a batch


class Model(nn.Module):
    """Two halves of 13 million parameters each."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = half(), half()
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.decoder(self.encoder(values)))
        return logits


class Block(nn.Module):
    """A layer, and what it adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = values + self.layer(values).relu()
        return added


def half() -> nn.Sequential:
    """Return half of the model."""
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the cross entropy, and how many are right."""
    values, labels = batch
    logits = model(values)
    right = (logits.argmax(1) == labels).float().mean()
    return {"loss": nn.functional.cross_entropy(logits, labels), "accuracy": right}


def rows() -> TensorDataset:
    """Return noise around ten points."""
    torch.manual_seed(1)
    points, labels = torch.randn(10, WIDTH), torch.arange(256) % 10
    return TensorDataset(points[labels] + 0.5 * torch.randn(256, WIDTH), labels)


def main() -> None:
    """Train, and print a digest of the parameters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="cpu")
    parser.add_argument("--split", nargs="*", default=None)
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    join_groups()
    torch.manual_seed(0)
    trainer = quorate.Trainer(
        Model(),
        loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-4, amsgrad=True),
        batch_size=ROWS * SHARDS,
        shards=SHARDS,
        devices=args.devices,
        workers=quorate.Workers(1, engine="towers"),
        compute=quorate.Compute(split=args.split),
    )
    *_, report = trainer.updates(rows(), steps=args.steps)
    digest = hashlib.sha256()
    for parameter in trainer.model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    accuracy = report.metrics["accuracy"]
    print(f"accuracy {accuracy:.2f}, parameters {digest.hexdigest()[:16]}")
    if args.steps >= 24 and accuracy < 0.9:
        raise SystemExit("expected an accuracy of at least 0.9")


if __name__ == "__main__":
    main()
