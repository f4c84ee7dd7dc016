"""What single.py and train.py have in common: options, optimizer, schedule, augmentation."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from model import OnePixel, UNet
from tiles import Tiles
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import default_collate

from quorate import Draws
from quorate.data.images import turn


def parse(description: str) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--baseline", action="store_true", help="a network that sees one pixel")
    parser.add_argument("--colour", action="store_true", help="not in grey")
    parser.add_argument("--updates", type=int, default=Recipe.updates)
    parser.add_argument("--batch-size", type=int, default=Recipe.batch_size, help="tiles")
    parser.add_argument("--lr", type=float, default=Recipe.lr, help="at its highest")
    parser.add_argument("--data", type=Path, help="a folder with bmng.jpg and zones.png")
    parser.add_argument("--target", type=float, default=0.62, help="least mean IoU")
    parser.add_argument("--above", type=Path, metavar="RUN_DIR", help="of a run with --baseline")
    parser.add_argument("--margin", type=float, default=0.15, help="least distance to that one")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/segmentation"))
    return parser.parse_args()


@dataclass(frozen=True)
class Recipe:
    """How a network is made and trained."""

    baseline: bool = False
    colour: bool = False
    batch_size: int = 32  # tiles
    updates: int = 1200
    lr: float = 4e-3  # at its highest

    @property
    def shards(self) -> int:
        """How many pieces a batch is cut into. BatchNorm has 16 tiles, of all scales, in each."""
        return max(1, self.batch_size // 16)

    @classmethod
    def of(cls, options: argparse.Namespace) -> Recipe:
        """What the command line says."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})

    def network(self) -> torch.nn.Module:
        """A new one."""
        kind = OnePixel if self.baseline else UNet
        return kind(3 if self.colour else 1)

    def optimizer(self, parameters: Sequence[torch.nn.Parameter]) -> AdamW:
        """AdamW."""
        return AdamW(parameters, lr=self.lr, weight_decay=1e-2)

    def schedule(self, optimizer: torch.optim.Optimizer) -> OneCycleLR:
        """Up for 15% of the updates, then down to zero along a cosine."""
        return OneCycleLR(optimizer, self.lr, total_steps=self.updates + 1, pct_start=0.15)


def turned(
    batch: Sequence[torch.Tensor], draws: Draws
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each tile in one of the eight symmetries of a square: four rotations, flipped or not."""
    images, classes, levels = batch
    turns = draws.integers(8)
    return turn(images, turns), turn(classes[:, None], turns)[:, 0], levels


def batches(tiles: Tiles, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Turned tiles, epoch after epoch, each in an order of its own; without end."""
    for epoch in itertools.count():
        order = torch.randperm(len(tiles), generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(size):
            yield turned(default_collate([tiles[row] for row in rows]), Draws(0, epoch, rows))
