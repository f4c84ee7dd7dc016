"""Representations without labels: InfoNCE over two distorted views of each Fashion-MNIST image.

    python examples/contrastive.py                                     # every device
    quorate run --devices cpu --workers 2 examples/contrastive.py      # with the same bits

Each of a batch's 512 images is to be found among all 512 by its other view (SimCLR, Chen et al.
2020). Computed in shards of 64 a loss would have 63 negatives and not 511; ``quorate.Gather`` has
the representations of all shards before it, and its gradient is that of the whole batch. It ends
with exit code 1 if fewer of the test images are found, among 512 each, than --target.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from open_data import fashion_mnist
from torch import nn

import quorate


class Encoder(nn.Module):
    """28x28 grey images to 128 features; what is contrasted is a projection of these to 64."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, stride=2, padding=1), nn.GroupNorm(8, 32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GroupNorm(8, 64), nn.ReLU(),
            nn.Flatten(), nn.Linear(64 * 7 * 7, 128), nn.ReLU(),
        )  # fmt: skip
        self.projection = nn.Linear(128, 64)
        self.log_temperature = nn.Parameter(torch.tensor(-1.6))  # learnt, from 0.2


def view(images: torch.Tensor) -> torch.Tensor:
    """Images (B, 1, 28, 28) in bytes, each moved, turned, enlarged, mirrored and made noisy."""
    n = len(images)
    angle, zoom = 0.3 * (torch.rand(n) - 0.5), 0.75 + 0.35 * torch.rand(n)
    mirror = torch.randint(0, 2, (n,)) * 2.0 - 1
    x = torch.stack([zoom * mirror * angle.cos(), -zoom * angle.sin(), 0.3 * torch.rand(n) - 0.15])
    y = torch.stack([zoom * mirror * angle.sin(), zoom * angle.cos(), 0.3 * torch.rand(n) - 0.15])
    places = torch.stack([x.T, y.T], dim=1).to(images.device)
    grid = F.affine_grid(places, list(images.shape), align_corners=False)
    moved = F.grid_sample(images / 255, grid, align_corners=False)
    return moved * (0.6 + 0.8 * torch.rand(n, 1, 1, 1).to(moved)) + 0.05 * torch.randn_like(moved)


def represent(model: Encoder, batch: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Two views of a shard's images, as unit vectors (n, 64) each. Labels are not used."""
    images, _ = batch
    views = [view(images) for _ in range(2)]
    return tuple(F.normalize(model.projection(model.features(v)), dim=1) for v in views)


def info_nce(model: Encoder, views: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """Cross entropy of finding each of B images by its other view, both ways."""
    likeness = views[0] @ views[1].T / model.log_temperature.exp()  # (B, B)
    own = torch.arange(len(likeness), device=likeness.device)
    return {
        "loss": (F.cross_entropy(likeness, own) + F.cross_entropy(likeness.T, own)) / 2,
        "found": (likeness.argmax(1) == own).float().mean(),
    }


def main() -> None:
    """Train, and count how many test images are found by their other view."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=512, help="rows that are contrasted")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--data", type=Path, help="a folder with the four IDX files")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/contrastive"))
    parser.add_argument("--target", type=float, default=0.6, help="least share that is found")
    options = parser.parse_args()
    train, test = fashion_mnist.load(options.data)
    trainer = quorate.Trainer(
        Encoder,
        quorate.Gather(represent, info_nce),
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
        batch_size=options.batch_size,
        shards=options.shards,
        run_dir=options.run_dir,
    )
    trainer.fit(train, epochs=options.epochs)
    found = trainer.evaluate(test)["found"]
    print(f"{found:.4f} of the test images are found among {options.batch_size}")
    if found < options.target:
        sys.exit(1)


if __name__ == "__main__":
    main()
